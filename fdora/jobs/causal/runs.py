"""How microbatches run: losses, steps, and what is done about an adapter that diverges.

In one process; or through a pipeline, the model's blocks cut into stages, each of whose adapters train on one process. There
every process has the model and all adapters, and reads the data; of the frozen weights it uses those of its own stages alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fdora._check import fail
from fdora.jobs.causal.banks import Layer, Logits, check_apart, norms_of, unknown
from fdora.jobs.causal.data import FN, Course, Packed, pack
from fdora.jobs.loop import Job, Links, Model, Stage, State, Wire, Work, gather_state, run_pipeline, select_state, train_step
from fdora.jobs.loop.records import copied
from fdora.jobs.schedule import depth_of, interleaved

logger = logging.getLogger("fdora.jobs")

Left = dict[str, int]
"""Adapters that have diverged, and the steps that they had taken."""
Ran = list[tuple[Work, Tensor]]
"""Microbatches that are through, without adapters that have diverged, and the losses of their samples."""
Listen = Callable[[State, Sequence[Work], Callable[[Work], Packed]], list[Tensor]]
"""The losses of microbatches with the parameters as they are."""


class Runs(NamedTuple):
    """How a training goes on from a state."""

    ahead: Callable[[State, Left, int], tuple[State, Ran]]
    """``ahead(state, left, stop)``: one microbatch or more, none from ``stop`` on. An adapter that diverges in them leaves."""
    judge: Callable[[State, Course], float]
    """The mean loss of samples that are one batch."""
    own: Callable[[State], State] = lambda state: state
    """With this process's parameters, of all."""
    whole: Callable[[State], State] = lambda state: state
    """And the other way."""


def alone(
    model: Any, layers: Mapping[str, Layer], logits: Logits, state: State, course: Course, rows: Sequence[Job], seed: int
) -> Runs:
    """In this process."""
    device = next(iter(state.params.values())).A.device
    check_apart(model, partial(logits, state.params, state.kept), device, len(rows))
    see = partial(losses_of, logits)

    def finite(params: Any, norms: Any, packed: Packed) -> Tensor:
        """It waits for the GPU. The samples of a microbatch share products, of which a mask makes 0 times NaN: where one
        adapter's are not finite, those of all may be NaN, and nothing may be added to anybody's gradient."""
        losses = see(params, norms, packed)
        if not bool(losses.isfinite().all()):
            raise ArithmeticError
        return losses

    trained = Model(finite, partial(norms_of, layers))

    @torch.no_grad()
    def listen(state: State, works: Sequence[Work], data: Callable[[Work], Packed]) -> list[Tensor]:
        return [see(state.params, state.kept, data(work)) for work in works]

    def ahead(state: State, left: Left, stop: int) -> tuple[State, Ran]:
        n = state.position
        while True:
            work = without(course.works[n], rows, left)
            data = drawn(course, work, n, device, seed) if work.samples else None
            try:
                after, losses = train_step(state, work, data, model=trained, jobs=rows, donate=True)
                return after, [(work, losses)]
            except ArithmeticError:
                leave(listen, state, work, partial(drawn, course, n=n, device=device, seed=seed), rows, left)

    return Runs(ahead, partial(judged, listen, device))


def drawn(course: Course, work: Work, n: int, device: torch.device, seed: int) -> Packed:
    """Microbatch n, with its masks of dropout."""
    return pack(course, work, device)._replace(seed=seed * len(course.works) + n)


def losses_of(logits: Logits, params: Any, norms: Any, packed: Packed) -> Tensor:
    """Of each sample the sum over its labels."""
    found = logits(params, norms, packed)
    wide = found.to(torch.promote_types(found.dtype, torch.float32))
    each = cross_entropy(wide, packed.labels, reduction="none")
    return torch.stack([own.sum() for own in each.split(packed.counts)])


def leave(listen: Listen, state: State, work: Work, data: Callable[[Work], Packed], rows: Sequence[Job], left: Left) -> None:
    """Adapters whose losses are not finite without those of the others; all, where that is so of none alone."""
    names = [rows[a].name for a in dict.fromkeys(sample.adapter for sample in work.samples)]
    own = [without(work, rows, {*names} - {name}) for name in names]
    losses = zip(names, listen(state, own, data), strict=True)
    for name in [name for name, each in losses if not bool(each.isfinite().all())] or names:
        remove(name, state, rows, left)


def leave_at_end(state: State, rows: Sequence[Job], left: Left) -> None:
    """Adapters whose parameters are not finite after their last step, which no loss has shown."""
    tensors = [t for params in state.params.values() for t in params if t is not None]
    for a, job in enumerate(rows):
        if job.name not in left and not all(bool(t[a].isfinite().all()) for t in tensors):
            remove(job.name, state, rows, left)


def remove(name: str, state: State, rows: Sequence[Job], left: Left) -> None:
    left[name] = next(n for n, job in zip(state.steps, rows, strict=True) if job.name == name)
    logger.warning("%s diverged after %d steps and leaves: it stays as it was", name, left[name])


def without(work: Work, rows: Sequence[Job], left: Collection[str]) -> Work:
    kept = [each for each in zip(work.samples, work.weights, strict=True) if rows[each[0].adapter].name not in left]
    samples, weights = zip(*kept, strict=True) if kept else ((), ())
    return Work(samples, weights, tuple(batch for batch in work.due if rows[batch[0]].name not in left))


def shares(work: Work, losses: Tensor) -> list[float]:
    """What each sample adds to the loss of its batch."""
    return (losses.double().cpu() * torch.tensor(work.weights, dtype=torch.float64)).tolist()


def judged(listen: Listen, device: torch.device, state: State, course: Course) -> float:
    losses = listen(state, course.works, partial(pack, course, device=device))
    return sum(map(sum, map(shares, course.works, losses)))


class Cut(NamedTuple):
    """Where a model is cut."""

    blocks: list[nn.Module]
    """The layers of its decoder, and the norm behind them."""
    parts: list[range]
    """Those of each stage."""


def cut_of(model: Any, stages: int) -> Cut:
    if stages == 1:
        return Cut([], [])
    decoder = model.get_decoder()
    blocks = [*getattr(decoder, "layers", ()), getattr(decoder, "norm", None)]
    count = len(blocks) - 1
    if None in blocks:
        raise unknown(model, "lacks the layers, or the norm behind them, between which it is cut")
    if count < stages:
        raise fail(FN, "stages", f"at most {count}, the layers of the model", stages, "Each stage has one or more.")
    return Cut(blocks, [range(count * n // stages, count * (n + 1) // stages + (n + 1 == stages)) for n in range(stages)])


def depth_for(stages: int, links: Links) -> int:
    devices = len(links.ranks)
    if stages % devices:
        raise fail(FN, "stages", f"a multiple of the {devices} processes", stages, "Each has as many.")
    return depth_of(interleaved(devices, 2 * stages * devices, stages // devices))


def staged(
    model: Any,
    layers: Mapping[str, Layer],
    logits: Logits,
    state: State,
    course: Course,
    rows: Sequence[Job],
    seed: int,
    *,
    cut: Cut,
    links: Links,
) -> Runs:
    """Through stages: this process has that of its number, or several."""
    inner, (blocks, parts) = model.get_base_model(), cut
    home = {module: n for n, block in enumerate(blocks) for module in block.modules()}
    width, dtype = inner.config.get_text_config().hidden_size, inner.get_input_embeddings().weight.dtype
    device = next(blocks[parts[links.rank][0]].parameters()).device
    stages = {}
    for n in range(links.rank, len(parts), len(links.ranks)):
        mine = tuple(path for path in layers if home.get(model.get_submodule(path), len(blocks) - 1) in parts[n])
        stages[n] = Stage(partial(forward, logits, parts[n], parts[n].stop == len(blocks)), mine, partial(norms_of, layers))

    def see(n: int, packed: Packed) -> Tensor:
        params = {path: state.params[path] for path in stages[n].names}
        x = torch.randn(9, width, generator=torch.Generator().manual_seed(n)).to(device, dtype)[packed.ids]
        if not torch.equal(logits({}, {}, packed, x, range(0)), x):
            raise unknown(inner, "changes elsewhere than in its layers what they give each other")
        found = logits(params, norms_of(layers, params), packed, x if n else None, parts[n])
        return found if n + 1 == len(parts) else found[packed.at]

    for n in stages:
        check_apart(model, partial(see, n), device, len(rows))
    wire = Wire(lambda work: (sum(sample.length for sample in work.samples), width), dtype, device)
    line = Line(stages, wire, links, course, rows, partial(drawn, course, device=device, seed=seed))
    own = partial(select_state, names=[path for stage in stages.values() for path in stage.names])
    return Runs(line.ahead, partial(judged, line.listen, device), own, partial(gather_state, links=links))


def forward(logits: Logits, part: range, last: bool, params: Any, norms: Any, x: Tensor | None, packed: Packed) -> Tensor:
    see = partial(logits, x=x, part=part)
    return losses_of(see, params, norms, packed) if last else see(params, norms, packed)


class Line(NamedTuple):
    """The pipeline, as one process of it sees it."""

    stages: Mapping[int, Stage]
    wire: Wire
    links: Links
    course: Course
    rows: Sequence[Job]
    drawn: Callable[..., Packed]
    """Of a microbatch and its place."""

    def through(self, state: State, works: Sequence[Work], data: Callable[[int], Packed]) -> tuple[State, dict[int, Tensor]]:
        """All processes get the losses."""
        ran = run_pipeline(copied(state), works, data, stages=self.stages, wire=self.wire, jobs=self.rows, links=self.links)
        each = self.links.gathered({n: losses.cpu() for n, losses in ran.losses.items()})
        return ran.state, {n: losses for found in each for n, losses in found.items()}

    def listen(self, state: State, works: Sequence[Work], data: Callable[[Work], Packed]) -> list[Tensor]:
        """With gradients and steps that nobody uses: a pipeline goes both ways."""
        batches = {sample.adapter: sample.batch for work in works for sample in work.samples}
        still = state._replace(steps=tuple(batches.get(a, 0) for a in range(len(self.rows))), position=0)
        _, found = self.through(still, works, lambda n: data(works[n]))
        return [found[n] for n in range(len(works))]

    def ahead(self, state: State, left: Left, stop: int) -> tuple[State, Ran]:
        """Where an adapter diverges, again up to there, and then without it: with it others have stepped before it was seen."""
        begin = state.position
        while True:
            ahead = (without(work, self.rows, left) for work in self.course.works[begin:stop])
            works = [*self.course.works[:begin], *ahead]
            after, found = self.through(state, works, lambda n, works=works: self.drawn(works[n], n))  # type: ignore[misc]
            wrong = [n for n, losses in found.items() if not bool(losses.isfinite().all())]
            if not wrong:
                return after, [(works[n], found.get(n, torch.empty(0))) for n in range(begin, stop)]
            stop = min(wrong)
            if stop == begin:
                leave(self.listen, state, works[begin], lambda work: self.drawn(work, begin), self.rows, left)
                stop = begin + 1
