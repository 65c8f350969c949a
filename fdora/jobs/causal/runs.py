"""How microbatches run: losses, steps, and what is done about an adapter that diverges. Here in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fdora.jobs.causal.banks import Layer, Logits, check_apart, norms_of
from fdora.jobs.causal.data import Course, Packed, pack
from fdora.jobs.loop import Job, Model, State, Work, train_step

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
    models = [Model(partial(each, logits), partial(norms_of, layers)) for each in (losses_of, finite_losses_of)]

    @torch.no_grad()
    def listen(state: State, works: Sequence[Work], data: Callable[[Work], Packed]) -> list[Tensor]:
        return [models[0].forward(state.params, state.kept, data(work)) for work in works]

    def ahead(state: State, left: Left, stop: int) -> tuple[State, Ran]:
        n = state.position
        while True:
            work = without(course.works[n], rows, left)
            data = drawn(course, work, n, device, seed) if work.samples else None
            try:
                after, losses = train_step(state, work, data, model=models[1], jobs=rows, donate=True)
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


def finite_losses_of(logits: Logits, params: Any, norms: Any, packed: Packed) -> Tensor:
    """It waits for the GPU. The samples of a microbatch share products, of which a mask makes 0 times NaN: where one adapter's
    are not finite, those of all may be NaN, and nothing may be added to anybody's gradient."""
    losses = losses_of(logits, params, norms, packed)
    if not bool(losses.isfinite().all()):
        raise ArithmeticError
    return losses


def leave(listen: Listen, state: State, work: Work, data: Callable[[Work], Packed], rows: Sequence[Job], left: Left) -> None:
    """Adapters whose losses are not finite without those of the others; all, where that is so of none alone."""
    names = [rows[a].name for a in dict.fromkeys(sample.adapter for sample in work.samples)]
    own = [without(work, rows, {*names} - {name}) for name in names]
    losses = zip(names, listen(state, own, data), strict=True)
    for name in [name for name, each in losses if not bool(each.isfinite().all())] or names:
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
