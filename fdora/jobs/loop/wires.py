"""What stages send each other: activations one way, their gradients the other.

NCCL is where an order can make processes wait for each other for ever, in three ways. So

* A communicator runs what a process issues one after the other. Activations and gradients have groups of their own, and senders
  have those of their colour, so that in a group a process sends or receives, with one partner, and no message waits behind
  another link's. In it tensors go in the order of the sender's actions.
* Two processes make the communicator at its first message, in which the host waits for the other and for its own GPU.
  :func:`connect` sends a number over every link, before anything else is under way.
* A GPU that waits for a message stops the host wherever that waits for the GPU: a kernel that is loaded, memory given back. So
  both sides issue a message by one clock, the simulator's, in which an action takes as long as its tokens are many: a send when
  its action ends, the receive before the first action that starts then or later. A process may then wait before each action
  for all that it has issued: what it issued for time t waits for actions that started before t, and those for messages of
  earlier times. By induction over t all get through, in whatever times the actions really take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fdora._check import fail
from fdora.jobs.loop.records import Work
from fdora.jobs.loop.watch import Waiter, Watch, on_gpus
from fdora.jobs.schedule import Action, simulate


class Wire(NamedTuple):
    """The shape, dtype and device of the activations that a stage sends to the next."""

    shape: Callable[[Work], Sequence[int]]
    """From the microbatch: it need not be the same for all."""
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def empty(self, work: Work) -> Tensor:
        return torch.empty(tuple(self.shape(work)), dtype=self.dtype, device=self.device)

    def check(self, fn: str, y: Tensor, work: Work) -> None:
        """The other side takes it for what was announced."""
        want, have = (tuple(self.shape(work)), self.dtype), (tuple(y.shape), y.dtype)
        if want != have:
            raise fail(fn, "wire", f"{have[0]} {have[1]}, what forward gave", f"{want[0]} {want[1]}", "It says what comes.")


class Links(NamedTuple):
    """The process groups of one pipeline, from :func:`connect`."""

    ranks: tuple[int, ...]
    """Global rank of each process, in the order of the stages."""
    rank: int
    """This process's place among them."""
    down: tuple[Any, ...]
    """The groups in which the places of each colour send activations."""
    up: tuple[Any, ...]
    """Those in which they send gradients."""
    sums: Any
    """All, through gloo: norms."""

    def group(self, sender: int, step: int) -> Any:
        """Where this place sends to the next one (step 1) or to the one before it (-1)."""
        return (self.down if step > 0 else self.up)[colour(len(self.ranks), sender)]

    def gathered(self, thing: Any) -> list[Any]:
        """What each place has, pickled on the way. All of them call it."""
        each = [thing] * len(self.ranks)
        if self.sums is not None:
            dist.all_gather_object(each, thing, group=self.sums)
        return each

    def open(self) -> None:
        """A number over each link, in one order for all: nobody waits for a later one, and those of one colour go together."""
        count = len(self.ranks)
        for step in (1, -1):
            for sender in sorted(range(count), key=partial(colour, count)):
                group, ends = self.group(sender, step), (sender, (sender + step) % count)
                if self.rank in ends:
                    number = torch.zeros(1, device="cuda" if on_gpus(group) else "cpu")
                    move: Any = dist.isend if self.rank == sender else dist.irecv
                    move(number, self.ranks[ends[self.rank == sender]], group=group).wait()
                    number.cpu()  # of a GPU: it is through


def connect(ranks: Sequence[int] | None = None) -> Links:
    """The groups of a pipeline over these processes, in the order of its stages. All of them call it, and no other.

    They must have made equally many groups before: by that number torch names one that not all processes of the world make.
    Where ``init_process_group`` was given NCCL's ``device_id``, every process of the world makes groups at the same time: all
    call it, each for the pipeline it is in.

    Args:
      ranks: global ranks; None is all of them, or this process alone where ``torch.distributed`` was not started.

    Raises:
      FdoraError: this process is not among them, or one is there twice.
    """
    if not dist.is_available() or not dist.is_initialized():
        if ranks is not None and tuple(ranks) != (0,):
            remedy = "Call torch.distributed.init_process_group first."
            raise fail("jobs.loop.connect", "ranks", "None or [0] in one process", list(ranks), remedy)
        return Links((0,), 0, (None,), (None,), None)
    members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
    me = dist.get_rank()
    if me not in members or len(set(members)) < len(members):
        raise fail("jobs.loop.connect", "ranks", f"different ranks, {me} among them", list(members), "Only members call it.")
    if len(members) == 1:
        return Links(members, 0, (None,), (None,), None)

    me, colours = members.index(me), max(map(partial(colour, len(members)), range(len(members)))) + 1
    down, up, (sums,) = (
        tuple(dist.new_group(sorted(members), use_local_synchronization=True, backend=backend) for _ in range(count))
        for count, backend in ((colours, None), (colours, None), (1, "gloo"))
    )
    links = Links(members, me, down, up, sums)
    links.open()
    return links


def colour(count: int, sender: int) -> int:
    """Of the group in which this place sends. Neighbours in the ring differ; in an odd ring the last has a third."""
    return 2 if count % 2 and sender == count - 1 else sender % 2


Posts = Mapping[Action, Sequence[Action]]


def receives(works: Sequence[Work], order: Sequence[Action], links: Links, chunks: int, first: int) -> Posts:
    """Action of this process -> actions whose receives it posts before it. ``first``: where in ``works`` it starts."""
    devices = len(links.ranks)
    tasks = simulate([work.samples for work in works[first:]], devices, chunks=chunks).tasks
    times = {task.action._replace(microbatch=first + task.action.microbatch): task for task in tasks}
    coming = []
    for action in order:
        source = action._replace(stage=action.stage + (1 if action.backward else -1))
        if source in times and source.stage % devices != links.rank:
            coming.append((times[source].end, action))
    starts = [times[action].start for action in order]
    posts: dict[Action, list[Action]] = {}
    for end, action in sorted(coming):
        posts.setdefault(order[bisect_left(starts, end)], []).append(action)
    return posts


class Mail:
    """What is under way to and from this process."""

    def __init__(self, links: Links, posts: Posts, end: int, empty: Callable[[int], Tensor], watch: Watch) -> None:
        self.links, self.posts, self.end, self.empty, self.watch = links, posts, end, empty, watch
        self.here: dict[Action, tuple[Any, Tensor]] = {}
        self.waiter = Waiter()  # gloo says that a send is through only to those who wait for it
        self.sent: deque[tuple[Any, Future[None] | None, Tensor]] = deque()

    def expect(self, action: Action) -> None:
        """Post the receives that are due before it. The send of the action before it was the last thing that was done."""
        for each in self.posts.get(action, ()):
            step = -1 if each.backward else 1
            tensor, place = self.empty(each.microbatch), (each.stage - step) % len(self.links.ranks)
            work = dist.irecv(tensor, self.links.ranks[place], group=self.links.group(place, step))
            self.here[each] = work, tensor

    def take(self, action: Action) -> Tensor:
        """What this action works on."""
        work, tensor = self.here.pop(action)
        self.watch.wait(work, tensor)
        return tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Its result, to the stage that wants it; on this process it stays where it is."""
        step = -1 if action.backward else 1
        target = action.stage + step
        place = target % len(self.links.ranks)
        if place == self.links.rank:
            self.here[action._replace(stage=target)] = None, tensor
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.links.ranks[place], group=self.links.group(self.links.rank, step))
        self.sent.append((work, None if tensor.is_cuda else self.waiter.hand(work), tensor))
        while self.sent and (self.sent[0][0].is_completed() if self.sent[0][1] is None else self.sent[0][1].done()):
            self.sent.popleft()

    def close(self) -> None:
        """Until all that was sent is through."""
        for work, handed, tensor in self.sent:
            if handed is None:
                self.watch.wait(work, tensor)
            else:
                self.watch.finish(handed)
        self.sent.clear()
        self.waiter.queue.put(None)
