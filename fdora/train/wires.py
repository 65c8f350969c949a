"""What stages send each other: activations one way, their gradients the other.

With NCCL a group is a queue between each two processes, and two that both send first in one queue wait for each other. So
activations and gradients have groups of their own, and of each kind even and odd senders: nobody sends both ways in one. In a
queue tensors go in the order of the sender's actions, which is that of the receiver's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fdora._check import fail
from fdora.schedule import Action
from fdora.train.records import Work
from fdora.train.watch import Handed, Waiter, Watch


class Wire(NamedTuple):
    """What a stage hands to the next."""

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
    """Groups of one pipeline."""

    ranks: tuple[int, ...]
    """Global rank of each process, in the order of the stages."""
    rank: int
    """This process's place among them."""
    down: tuple[Any, ...]
    """The groups in which even and odd places send activations."""
    up: tuple[Any, ...]
    """Those in which they send gradients."""
    sums: Any
    """All, through gloo: norms."""


def connect(ranks: Sequence[int] | None = None) -> Links:
    """The groups of a pipeline over these processes, in the order of its stages. All of them call it, and no other.

    They must have made equally many groups before: by that number torch names one that not all processes of the world make.

    Args:
      ranks: global ranks; None is all of them, or this process alone where ``torch.distributed`` was not started.

    Raises:
      FdoraError: this process is not among them, or one is there twice.
    """
    if not dist.is_available() or not dist.is_initialized():
        if ranks is not None and tuple(ranks) != (0,):
            remedy = "Call torch.distributed.init_process_group first."
            raise fail("train.connect", "ranks", "None or [0] in one process", list(ranks), remedy)
        return Links((0,), 0, (None,), (None,), None)
    members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
    me = dist.get_rank()
    if me not in members or len(set(members)) < len(members):
        raise fail("train.connect", "ranks", f"different ranks, {me} among them", list(members), "Only members call it.")
    if len(members) == 1:
        return Links(members, 0, (None,), (None,), None)

    down, up, (sums,) = (
        tuple(dist.new_group(sorted(members), use_local_synchronization=True, backend=backend) for _ in range(count))
        for count, backend in ((2, None), (2, None), (1, "gloo"))
    )
    return Links(members, members.index(me), down, up, sums)


class Mail:
    """What is under way to and from this process."""

    def __init__(self, links: Links, order: Sequence[Action], end: int, empty: Callable[[int], Tensor], watch: Watch) -> None:
        self.links, self.order, self.end, self.empty, self.watch = links, order, end, empty, watch
        self.posted = 0
        self.here: dict[Action, tuple[Any, Tensor]] = {}
        self.waiter = Waiter()  # gloo says that a send is through only to those who wait for it
        self.sent: deque[tuple[Any, Handed | None, Tensor]] = deque()

    def group(self, action: Action, sender: int) -> Any:
        return (self.links.up if action.backward else self.links.down)[sender % 2]

    def expect(self, at: int) -> None:
        """Post the receives of the action at this place and of the next, so that what arrives early has a place."""
        while self.posted < min(at + 2, len(self.order)):
            action = self.order[self.posted]
            self.posted += 1
            source = action.stage + (1 if action.backward else -1)
            count = len(self.links.ranks)
            if not 0 <= source <= self.end or source % count == self.links.rank:
                continue
            tensor = self.empty(action.microbatch)
            group = self.group(action, source % count)
            self.here[action] = dist.irecv(tensor, self.links.ranks[source % count], group=group), tensor

    def take(self, action: Action) -> Tensor:
        """What this action works on."""
        work, tensor = self.here.pop(action)
        self.watch.wait(work, tensor)
        return tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Its result, to the stage that wants it; on this process it stays where it is."""
        target = action.stage + (-1 if action.backward else 1)
        place = target % len(self.links.ranks)
        if place == self.links.rank:
            self.here[action._replace(stage=target)] = None, tensor
            return
        group = self.group(action, self.links.rank)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.links.ranks[place], group=group)
        self.sent.append((work, None if tensor.is_cuda else self.waiter.hand(work), tensor))
        while self.sent and (self.sent[0][0].is_completed() if self.sent[0][1] is None else self.sent[0][1].done.is_set()):
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
