"""Microbatches in a row: a batch of an adapter enters the pipeline when the batch before it has left it.

The optimizer steps between batch j and batch j + 1 of an adapter. At the first stage of 1F1B the forward of microbatch
t + depth is the first that comes after the backward of microbatch t. So, with positions p of microbatches that hold them,

    min p(a, j + 1) - max p(a, j) >= depth        for every adapter a and batch j

which also keeps batches in order, and two batches of an adapter out of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from fdora._check import fail
from fdora.jobs.schedule.records import Microbatch, Sample, Spec, check_spec

Batch = tuple[int, int]  # adapter, batch


def batches_of(microbatch: Iterable[Sample]) -> set[Batch]:
    return {(sample.adapter, sample.batch) for sample in microbatch}


def places(microbatches: Sequence[Iterable[Sample]]) -> dict[Batch, list[int]]:
    """The positions of each batch."""
    found: dict[Batch, list[int]] = {}
    for p, microbatch in enumerate(microbatches):
        for batch in batches_of(microbatch):
            found.setdefault(batch, []).append(p)
    return found


def neighbours(found: dict[Batch, list[int]]) -> Iterator[tuple[Batch, Batch]]:
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
    before = {other: one for one, other in neighbours(where)}
    following = {one: other for one, other in neighbours(where)}
    left = {batch: len(found) for batch, found in where.items()}
    free_from: dict[Batch, int] = {}  # of a batch whose microbatches are all placed: where the next may begin
    opened = {batch for batch in where if batch not in before}
    placed = [False] * len(real)
    out: list[Microbatch] = []
    head, count = 0, 0

    def ready(i: int) -> bool:
        mine = batches_of(real[i])
        return all(batch in opened and free_from.get(before.get(batch, batch), 0) <= len(out) for batch in mine)

    while count < len(real):
        while placed[head]:
            head += 1
        # a microbatch that is ready has a batch that is open
        others = sorted({i for batch in opened for i in where[batch] if not placed[i]}) if not ready(head) else [head]
        chosen = next((i for i in others if ready(i)), None)
        if chosen is None:
            if all(start <= len(out) for start in free_from.values()):
                have = f"microbatch {head}, which waits for ever: {sorted(batches_of(real[head]))}"
                raise fail(
                    "jobs.schedule.insert_noops", "microbatches", "in some right order", have, "Use what schedule() returns."
                )
            out.append(())
            continue
        out.append(real[chosen])
        placed[chosen] = True
        count += 1
        for batch in batches_of(real[chosen]):
            left[batch] -= 1
            if not left[batch]:
                opened.discard(batch)
                free_from[batch] = len(out) - 1 + spec.depth
                if batch in following:
                    opened.add(following[batch])
    return tuple(out)
