"""A schedule through a pipeline of processes: 1F1B, or interleaved with several stages on each.

Every process walks the actions that ``fdora.jobs.schedule.interleaved`` lists for it, the ones ``simulate`` times, and steps an
adapter's optimizer once *its own backward* of the batch's last microbatch is through and before the adapter's next forward.
Clipping needs the gradient's norm over all stages. Each stage posts its sum of squares when its part is through and waits for
the others before the adapter's next forward. By then they have come: that microbatch enters the first stage ``depth``
positions later, after the first stage's backward, which is everybody's last. So no stage waits, and the sum, in the order of
the processes, is the same bits on all.

Not the schedules of ``torch.distributed.pipelining``, whose stages this would fit into (an optimizer can step in
``backward_one_chunk``): of one ``step()`` they hold receive buffers for *every* microbatch, both ways (torch 2.13,
``_prepare_forward_infra``), so an epoch must be cut into pieces, and the pipeline drains after each; they want tensors of one
shape, padded to the capacity, and run no-ops; parameters are a module's, so an update in place meets graphs that hold it.
Here a microbatch has its own size, a no-op costs nothing, and what is in flight keeps the tensors it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fdora._check import fail
from fdora.jobs.loop.records import TREES, Job, Keep, Params, State, Work, kept_of
from fdora.jobs.loop.step import added, check_losses, leaves_of, optimizer_step, square_sum
from fdora.jobs.loop.watch import Watch, watching
from fdora.jobs.loop.wires import Links, Mail, Wire, receives
from fdora.jobs.schedule import Action, Task, depth_of, interleaved

FN = "jobs.loop.run_pipeline"
Sum = Callable[[], Tensor]


class Stage(NamedTuple):
    """One stage of a pipeline, as functions, with the names of its parameters."""

    forward: Callable[[Params, Any, Any, Any], Tensor]
    """``forward(params, kept, x, data)``: x: the stage before gave, None for the first; the last gives (samples,) losses."""
    names: tuple[str, ...]
    """Of the parameters it trains."""
    keep: Keep = None
    """As of :class:`Model`, of this stage's parameters."""


class Flight(NamedTuple):
    """A microbatch between its forward and its backward on a stage."""

    x: Tensor | None
    y: Tensor
    leaves: list[Tensor]


class Ran(NamedTuple):
    """The state, losses and timed tasks that :func:`run_pipeline` returns."""

    state: State
    losses: dict[int, Tensor]
    """Microbatch -> (samples,), on the process with the last stage; empty elsewhere."""
    tasks: tuple[Task, ...]
    """What this process did, from when to when; empty without a clock."""


def run_pipeline(
    state: State,
    works: Sequence[Work],
    data: Callable[[int], Any],
    *,
    stages: Mapping[int, Stage],
    wire: Wire,
    jobs: Sequence[Job],
    links: Links,
    clock: Callable[[], float] | None = None,
) -> Ran:
    """Run microbatches through the pipeline, from ``state.position`` on; it is empty again at the end. Every process calls it.

    Args:
      state: of this process's parameters (:func:`select_state`); donated.
      works: all of the schedule, of :func:`works_of`. Its ``Spec.depth`` must be that of the pipeline: the stages, or with
        several on each process twice the processes (``depth_of``).
      data: ``data(n)``, what stages take of microbatch n: offsets, masks, tokens, labels. Asked for at the stage's forward.
      stages: number -> stage, of this process: its rank among ``links.ranks``, that + processes, and so on.
      wire: what a stage hands to the next.
      jobs: as for :func:`train_step`.
      links: of :func:`connect`.
      clock: gives the time; each action is then timed, with the optimizer steps before it, without what it waits for others.
        For one process on a GPU it should wait for that.

    Raises:
      FdoraError: the stages are not this process's, the schedule's depth is too small, a stage gave what ``wire`` does not
        announce, or the last one no losses; or another process failed, with what it said.

    Memory: between forward and backward what autograd keeps, of at most ``depth`` microbatches a stage; a received tensor goes
    with its microbatch.
    References: Narayanan et al., 2021, arXiv:2104.04473, section 2.2; LoRAFusion, 2025, arXiv:2510.00206, section 5.
    """
    with watching(FN, links.sums, (*links.down, *links.up)) as watch:  # who is refused says so to those who are not
        order = check_order(state, works, stages, links)
        posts = receives(works, order, links, len(stages), state.position)
        end = len(links.ranks) * len(stages) - 1
        mail = Mail(links, posts, end, lambda n: wire.empty(works[n]), watch)
        own = Process(state, works, data, stages, wire, jobs, mail, clock)
        tasks = []
        for action in order:
            mail.expect(action)
            given, start = own.backward(action) if action.backward else own.forward(action)
            if clock:
                tasks.append(Task(links.rank, action, start, own.now()))
            if action.stage != (0 if action.backward else end):
                mail.send(action, given.detach())
        own.settle(sorted(own.due))
        mail.close()
        watch.idle(torch.device(wire.device))
        return Ran(own.state._replace(position=len(works)), own.losses, tuple(tasks))


@dataclass
class Process:
    """This process of the pipeline while it runs: the state as it is now, and what is between forward and backward."""

    state: State
    works: Sequence[Work]
    data: Callable[[int], Any]
    stages: Mapping[int, Stage]
    wire: Wire
    jobs: Sequence[Job]
    mail: Mail
    clock: Callable[[], float] | None
    flights: dict[Action, Flight] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    due: dict[int, Sum | None] = field(default_factory=dict)
    """Adapters whose batch is through."""

    def __post_init__(self) -> None:
        self.use(self.state)

    def use(self, state: State) -> None:
        """Of other parameters something else is kept."""
        self.state = state
        self.kept = {number: kept_of(stage.keep, part(state.params, stage)) for number, stage in self.stages.items()}

    def now(self) -> float:
        if self.clock is None:
            return 0.0
        self.mail.watch.idle(torch.device(self.wire.device))
        return self.clock()

    def settle(self, adapters: Sequence[int]) -> float:
        """Steps their optimizers. How long it took, once the others' sums were there."""
        if not adapters:
            return 0.0
        found = {a: self.due.pop(a) for a in adapters}
        squares = {a: total() for a, total in found.items() if total is not None}
        start = self.now()
        self.use(optimizer_step(self.state, self.jobs, squares, adapters, donate=True))
        return self.now() - start

    def forward(self, action: Action) -> tuple[Tensor, float]:
        """What it gives, and when it began, with the steps before it and without what it waited for."""
        n, stage, work, steps = action.microbatch, self.stages[action.stage], self.works[action.microbatch], self.state.steps
        settled = self.settle([a for a in self.due if any(s.adapter == a and s.batch > steps[a] for s in work.samples)])
        x = self.mail.take(action) if action.stage else None
        start = self.now()
        params, leaves = leaves_of(part(self.state.params, stage))
        x = None if x is None else x.requires_grad_()
        y = stage.forward(params, self.kept[action.stage], x, self.data(n))
        self.flights[action] = Flight(x, y, leaves)
        if action.stage == self.mail.end:
            check_losses(FN, y, work)
            self.losses[n] = y.detach()
        else:
            self.wire.check(FN, y, work)
        return y, start - settled

    def backward(self, action: Action) -> tuple[Tensor, float]:
        """The gradient of what the forward was given, and when it began."""
        stage, work, links = self.stages[action.stage], self.works[action.microbatch], self.mail.links
        x, y, leaves = self.flights.pop(action._replace(backward=False))
        dy = check_losses(FN, y, work) if action.stage == self.mail.end else self.mail.take(action)
        start = self.now()
        inputs = leaves if x is None else [x, *leaves]
        found: Any = torch.autograd.grad(y, inputs, dy, allow_unused=True) if inputs else ()  # a first stage may train nothing
        if x is not None:
            dx, *found = found
            y = torch.zeros_like(x) if dx is None else dx
        new = added(part(self.state.grads, stage), found, donate=True)
        self.state = self.state._replace(grads=self.state.grads | new)
        if action.stage == links.rank:  # the first of this process, whose backward is its last
            grads, watch = self.state.grads, self.mail.watch
            for a, _ in work.due:  # of who is clipped: what waits for the sum of squares over all processes
                self.due[a] = None if self.jobs[a].clip is None else sum_of(square_sum(grads, a), links, watch)
        return y, start


def check_order(state: State, works: Sequence[Work], stages: Mapping[int, Stage], links: Links) -> list[Action]:
    """What this process does. A schedule that this pipeline cannot run is refused on all processes, before they wait."""
    devices, chunks, first = len(links.ranks), len(stages), state.position
    if not chunks or sorted(stages) != [links.rank + devices * c for c in range(chunks)]:
        want = f"numbered {links.rank}, {links.rank + devices}, ... on process {links.rank} of {devices}"
        raise fail(FN, "stages", want, sorted(stages), "Stages go round the processes.")
    count = len(works) - first
    orders = interleaved(devices, count if chunks == 1 else count + -count % devices, chunks)  # no-ops at the end
    depth = depth_of(orders)
    ends = dict(enumerate(state.steps))  # of each adapter: the batch that is next
    freed: dict[int, int] = {}  # and where it may begin
    for n in range(first, len(works)):
        for a, j in sorted({sample[:2] for sample in works[n].samples}):
            if j != ends[a] or n < freed.get(a, first):
                want = f"in order, each batch {depth} microbatches after the one before it"
                remedy = f"Make the schedule with Spec(depth={depth}), and go on from the state it was left in."
                raise fail(FN, "works", want, f"batch {j} of adapter {a} at {n}", remedy)
        for a, j in works[n].due:
            ends[a], freed[a] = j + 1, n + depth
    shifted = (a._replace(microbatch=first + a.microbatch) for a in orders[links.rank])
    return [a for a in shifted if a.microbatch < len(works) and works[a.microbatch].samples]


def part(params: Params, stage: Stage) -> Params:
    return {name: params[name] for name in stage.names}


def sum_of(mine: Tensor, links: Links, watch: Watch) -> Sum:
    if links.sums is None:
        return lambda: mine
    watch.idle(mine.device)
    mine = mine.cpu()  # on a GPU the host waits here for this microbatch's backward, once for each batch of an adapter
    each = [torch.empty_like(mine) for _ in links.ranks]
    work: Any = dist.all_gather(each, mine, group=links.sums, async_op=True)

    def total() -> Tensor:
        watch.wait(work, mine)
        return torch.stack(each).sum()

    return total


def gather_state(state: State, links: Links) -> State:
    """The whole state from the parts of all processes, on the CPU of each: for :func:`save`, or another number of stages.

    ``kept`` is None. Every process calls it.
    """
    each = links.gathered({part: optree.tree_map(lambda t: t.detach().cpu(), getattr(state, part)) for part in TREES})
    trees = {part: {name: tree for one in each for name, tree in one[part].items()} for part in TREES}
    return State(**trees, kept=None, steps=state.steps, position=state.position)
