"""Microbatches in a row: a batch of an adapter enters the pipeline when the batch before it has left it.

The optimizer steps between batch j and batch j + 1 of an adapter. At the first stage of 1F1B the forward of microbatch
t + depth is the first that comes after the backward of microbatch t. So, with positions p of microbatches that hold them,

    min p(a, j + 1) - max p(a, j) >= depth        for every adapter a and batch j

which also keeps batches in order, and two batches of an adapter out of one microbatch.

Before that, what is left of one batch's packing shares microbatches with what is left of others: :func:`merge`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from fdora._check import check_positive, fail
from fdora.jobs.schedule.records import Microbatch, Sample, Spec, check_spec, load, tokens_of

Batch = tuple[int, int]  # adapter, batch
Places = dict[Batch, list[int]]  # the positions of each batch


def batches_of(microbatch: Iterable[Sample]) -> set[Batch]:
    return {(sample.adapter, sample.batch) for sample in microbatch}


def places(microbatches: Sequence[Iterable[Sample]]) -> Places:
    """The positions of each batch."""
    found: Places = {}
    for p, microbatch in enumerate(microbatches):
        for batch in batches_of(microbatch):
            found.setdefault(batch, []).append(p)
    return found


def neighbours(found: Places) -> Iterator[tuple[Batch, Batch]]:
    """Each batch with the next of its adapter."""
    batches = sorted(found)
    for one, other in pairwise(batches):
        if one[0] == other[0]:
            yield one, other


def insert_noops(microbatches: Sequence[Microbatch], spec: Spec) -> tuple[Microbatch, ...]:
    """The same microbatches in an order, and with no-ops between them, that keeps the distances of ``spec.depth``.

    At each position goes the first microbatch that need not wait; where all must, a no-op. No-ops that are there already are
    taken out first, so what comes out stays as it is when it goes in again.

    Raises:
      FdoraError: the spec is out of range, or no order at all is right: two batches of an adapter share a microbatch, or each
        of two adapters waits for the other.
    """
    check_spec("jobs.schedule.insert_noops", spec)
    real = [each for each in microbatches if each]
    where = places(real)
    following = dict(neighbours(where))
    left = {batch: len(found) for batch, found in where.items()}
    start = dict.fromkeys(where.keys() - following.values(), 0)  # of a batch that is next of its adapter: where it may begin
    placed = [False] * len(real)
    out: list[Microbatch] = []
    head = 0

    def ready(i: int) -> bool:
        return all(start.get(batch, inf) <= len(out) for batch in batches_of(real[i]))

    while True:
        while head < len(real) and placed[head]:
            head += 1
        if head == len(real):
            return tuple(out)
        # a microbatch that is ready has a batch that is next
        others = sorted({i for batch in start for i in where[batch] if not placed[i]}) if not ready(head) else [head]
        chosen = next((i for i in others if ready(i)), None)
        if chosen is None:
            if all(at <= len(out) for at in start.values()):
                have = f"microbatch {head}, which waits for ever: {sorted(batches_of(real[head]))}"
                raise fail(
                    "jobs.schedule.insert_noops", "microbatches", "in some right order", have, "Use what schedule() returns."
                )
            out.append(())
            continue
        out.append(real[chosen])
        placed[chosen] = True
        for batch in batches_of(real[chosen]):
            left[batch] -= 1
            if not left[batch]:
                del start[batch]
                if batch in following:
                    start[following[batch]] = len(out) - 1 + spec.depth


def optimizer_steps(microbatches: Sequence[Microbatch]) -> tuple[tuple[Batch, ...], ...]:
    """For each microbatch the (adapter, batch) pairs that end with it: once its backward is done on a stage, these adapters'
    optimizers step there.

    Count backwards, not forwards: a stage that counts forwards steps before the gradients of those in flight have come.
    """
    steps: list[list[Batch]] = [[] for _ in microbatches]
    for batch, found in sorted(places(microbatches).items()):
        steps[found[-1]].append(batch)
    return tuple(map(tuple, steps))


def segment_ends(microbatch: Microbatch, adapters: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Where each adapter's tokens end if the samples are concatenated: the offsets of ``torch.nn.functional.grouped_mm``.

    Samples of a microbatch are sorted by adapter already; an adapter without any ends where the one before it does. With
    ``multiple`` each adapter's tokens are followed by what is missing to the next multiple.

    Raises:
      FdoraError: a sample is of an adapter that is not among the first ``adapters``, or ``multiple`` is less than 1.
    """
    check_positive("jobs.schedule.segment_ends", "multiple", multiple, "1 adds nothing.")
    tokens = tokens_of(microbatch)
    for adapter in tokens:
        if not 0 <= adapter < adapters:
            raise fail("jobs.schedule.segment_ends", "adapters", f"more than {adapter}", adapters, "Count all adapters.")
    each = (tokens.get(adapter, 0) for adapter in range(adapters))
    return tuple(accumulate(n + -n % multiple for n in each))


Move = tuple[Sample, int]


class State(NamedTuple):
    """Microbatches under change, by their number at the start; what was taken out is empty."""

    bins: list[list[Sample]]
    loads: list[int]
    position: list[int]  # without what was taken out; in order
    where: Places  # the microbatches of each batch
    before: dict[Batch, Batch]
    after: dict[Batch, Batch]


def merge(microbatches: Sequence[Microbatch], spec: Spec) -> tuple[Microbatch, ...]:
    """Fewer microbatches, never more: one whose samples all find room in others is taken out.

    Those that hold least are tried first, again and again until none is left that could go. A sample goes into the microbatch
    that it fills most, between the batches before and after its own and ``spec.depth`` away from them; nothing is taken out
    that two batches need between them. All samples of a microbatch are moved, or none. What is right stays right;
    :func:`insert_noops` is for what was not.

    Raises:
      FdoraError: the spec is out of range.
    """
    check_spec("jobs.schedule.merge", spec)
    bins = [list(each) for each in microbatches]
    where = places(bins)
    pairs = list(neighbours(where))
    state = State(
        bins, [load(each, spec) for each in bins], list(range(len(bins))), where, {b: a for a, b in pairs}, dict(pairs)
    )
    more = True
    while more:
        more = False
        for p in sorted((p for p in range(len(bins)) if bins[p]), key=lambda p: (state.loads[p], p)):
            moves = emptied(p, state, spec)
            if not moves or not apart_without(p, state, spec):
                continue
            more = True
            for sample, q in moves:
                bins[q].append(sample)
                where[sample[:2]] = sorted({*where[sample[:2]], q} - {p})
            bins[p] = []
            for q in {p, *(q for _, q in moves)}:
                state.loads[q] = load(bins[q], spec)
            for q in range(p, len(bins)):
                state.position[q] -= 1
    kept = [p for p in range(len(bins)) if bins[p] or not microbatches[p]]
    return tuple(tuple(sorted(bins[p])) for p in kept)


def emptied(p: int, state: State, spec: Spec) -> list[Move] | None:
    """Where each sample of microbatch p can go; None where one cannot."""
    moves: list[Move] = []
    held: dict[int, list[Sample]] = {}  # microbatches with what was moved into them so far
    position = state.position  # p itself still counted: what lies beyond it from q lies far enough from p already
    for sample in sorted(state.bins[p], key=lambda each: (-each.length, each)):
        batch = sample[:2]
        first = position[state.where[state.before[batch]][-1]] + spec.depth if batch in state.before else 0
        last = position[state.where[state.after[batch]][0]] - spec.depth if batch in state.after else len(position)
        best: tuple[int, int] | None = None
        for q in range(bisect_left(position, first), bisect_right(position, last)):
            # a sample adds its whole multiples at least: most microbatches are full, and cost no more than this
            if q == p or not state.bins[q] or state.loads[q] + sample.length // spec.multiple > spec.units:
                continue
            used = load([*held.get(q, state.bins[q]), sample], spec)
            if used > spec.units or (best and best[0] >= used):
                continue
            best = used, q
        if best is None:
            return None
        q = best[1]
        held[q] = [*held.get(q, state.bins[q]), sample]
        moves.append((sample, q))
    return moves


def apart_without(p: int, state: State, spec: Spec) -> bool:
    """Whether all batches with p between them are still far enough from the next."""
    ends = ((state.where[batch][-1], state.where[following][0]) for batch, following in state.after.items())
    position = state.position
    return not any(last < p < first and position[first] - position[last] - 1 < spec.depth for last, first in ends)
