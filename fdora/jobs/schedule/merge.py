"""What is left of one batch's packing shares microbatches with what is left of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fdora.jobs.schedule.order import Batch, neighbours, places
from fdora.jobs.schedule.records import Microbatch, Sample, Spec, check_spec, load

Move = tuple[Sample, int]


class State(NamedTuple):
    """Microbatches under change, by their number at the start; what was taken out is empty."""

    bins: list[list[Sample]]
    loads: list[int]
    position: list[int]  # without what was taken out
    where: dict[Batch, list[int]]  # the microbatches of each batch
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
            if moves and apart_without(p, state, spec):
                take_out(p, moves, state, spec)
                more = True
    kept = [p for p in range(len(bins)) if bins[p] or not microbatches[p]]
    return tuple(tuple(sorted(bins[p])) for p in kept)


def emptied(p: int, state: State, spec: Spec) -> list[Move] | None:
    """Where each sample of microbatch p can go; None where one cannot."""
    moves: list[Move] = []
    held: dict[int, list[Sample]] = {}  # microbatches with what was moved into them so far
    position = state.position  # p itself still counted: what lies beyond it from q lies far enough from p already
    for sample in sorted(state.bins[p], key=lambda each: (-each.length, each)):
        batch = sample[:2]
        low = state.where[state.before[batch]][-1] if batch in state.before else None
        high = state.where[state.after[batch]][0] if batch in state.after else None
        best: tuple[int, int] | None = None
        for q in range(0 if low is None else low + 1, len(state.bins) if high is None else high):
            # a sample adds its whole multiples at least: most microbatches are full, and cost no more than this
            if q == p or not state.bins[q] or state.loads[q] + sample.length // spec.multiple > spec.units:
                continue
            used = load([*held.get(q, state.bins[q]), sample], spec)
            if used > spec.units or (best and best[0] >= used):
                continue
            if low is not None and position[q] - position[low] < spec.depth:
                continue
            if high is not None and position[high] - position[q] < spec.depth:
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
    for batch, following in state.after.items():
        last, first = state.where[batch][-1], state.where[following][0]
        if last < p < first and state.position[first] - state.position[last] - 1 < spec.depth:
            return False
    return True


def take_out(p: int, moves: list[Move], state: State, spec: Spec) -> None:
    for sample, q in moves:
        state.bins[q].append(sample)
        state.where[sample[:2]] = sorted({*state.where[sample[:2]], q} - {p})
    for q in {q for _, q in moves}:
        state.loads[q] = load(state.bins[q], spec)
    state.bins[p].clear()
    state.loads[p] = 0
    for q in range(p, len(state.position)):
        state.position[q] -= 1
