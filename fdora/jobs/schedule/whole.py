"""From lengths to a schedule: which adapters share microbatches, and all that follows.

Together they fill them better; apart, the batches of one group fill the time in which another waits for its optimizer step.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from itertools import repeat

from fdora._check import fail
from fdora._command import progress
from fdora.jobs.schedule.order import insert_noops, merge
from fdora.jobs.schedule.pack import available, greedy, settled, solved
from fdora.jobs.schedule.records import Lengths, Microbatch, Packed, Packing, Sample, Schedule, Spec, check_lengths, check_spec
from fdora.jobs.schedule.verify import verify

EVERY = 5  # adapters up to which every way to group them is tried: there are 52 for five, 203 for six
ROUNDS = 6  # of which the trial schedules are made

Groups = tuple[tuple[int, ...], ...]


def rounds_of(groups: Groups, lengths: Lengths) -> list[tuple[int, list[Sample]]]:
    """(group, samples that are packed together), in the order of training.

    A group has as many rounds as its longest adapter has batches. Batches of the others, and rounds of the groups, are spread
    evenly: who has fewer is not through long before the rest.
    """
    found = []
    for g, group in enumerate(groups):
        rounds = max((len(lengths[a]) for a in group), default=0)
        for k in range(rounds):
            batches = ((a, k * len(lengths[a]) // rounds, (k + 1) * len(lengths[a]) // rounds) for a in group)
            samples = [Sample(a, j, i, n) for a, j, after in batches if after > j for i, n in enumerate(lengths[a][j])]
            found.append(((2 * k + 1) / (2 * rounds), g, samples))
    return [(g, samples) for _, g, samples in sorted(found, key=lambda each: each[:2])]


def line_up(packings: Sequence[Packing], spec: Spec) -> tuple[Microbatch, ...]:
    """Packings one after the other, merged where that helps, with gaps."""
    row = tuple(each for packing in packings for each in packing.microbatches)
    ways = insert_noops(merge(row, spec), spec), insert_noops(row, spec)
    return min(ways, key=len)


def plan_groups(lengths: Lengths, spec: Spec) -> Groups:
    """The groups whose schedule has the fewest microbatches and no-ops, packed greedily, by the first batches of each adapter.

    Up to five adapters every way to group them is tried. For more: sorted by their mean length, dealt to and fro into 1, 2,
    3... groups, so that long samples meet short ones. Of equals the one with more groups wins: fewer gaps hang by one group.

    Args:
      lengths: ``lengths[adapter][batch][sample]``, in tokens.

    Raises:
      FdoraError: the spec is out of range, a sample does not fit, a batch is empty.
    """
    check_spec("jobs.schedule.plan_groups", spec)
    check_lengths("jobs.schedule.plan_groups", lengths, spec)
    longest = max(map(len, lengths), default=0)
    first = [batches[: -(-len(batches) * ROUNDS // max(ROUNDS, longest))] for batches in lengths]
    packed = cache(greedy)  # different groups have many rounds in common

    def cost(groups: Groups) -> tuple[int, int, Groups]:
        packings = [packed(tuple(samples), spec) for _, samples in rounds_of(groups, first)]
        return len(line_up(packings, spec)), -len(groups), groups

    return min(ways_to_group(lengths), key=cost)


def ways_to_group(lengths: Lengths) -> Iterator[Groups]:
    adapters = [a for a, batches in enumerate(lengths) if batches]
    if len(adapters) <= EVERY:
        yield from partitions(adapters)
        return
    tokens = {a: [n for batch in lengths[a] for n in batch] for a in adapters}
    ranked = sorted(adapters, key=lambda a: (-sum(tokens[a]) / len(tokens[a]), a))
    for count in range(1, len(adapters) + 1):
        there_and_back = [*range(count), *reversed(range(count))]
        groups: list[list[int]] = [[] for _ in range(count)]
        for n, a in enumerate(ranked):
            groups[there_and_back[n % (2 * count)]].append(a)
        yield tuple(tuple(sorted(group)) for group in groups)


def partitions(adapters: list[int]) -> Iterator[Groups]:
    """Every way to divide them, groups in the order of their first member."""
    if not adapters:
        yield ()
        return
    *others, last = adapters
    for groups in partitions(others):
        for g in range(len(groups)):
            yield (*groups[:g], (*groups[g], last), *groups[g + 1 :])
        yield (*groups, (last,))


EACH = 1.0  # seconds of one packing: what has not come by then seldom comes


def schedule(lengths: Lengths, spec: Spec, *, groups: Iterable[Iterable[int]] | None = None) -> Schedule:
    """The microbatches of several adapters that are trained together on one base, in order.

    ``plan_groups``, then ``pack`` for the batches that each group trains side by side, ``merge``, ``insert_noops``, ``verify``.
    A pure function of its arguments, unless the solver stops at ``spec.seconds``. Adapters in another order give the same
    microbatches.

    Args:
      lengths: ``lengths[adapter][batch][sample]``, in tokens; adapters may have different numbers of batches of any size.
      spec: capacity, depth and multiple; how long, and in how many processes, packings are solved. More than one process: the
        program that calls must be importable, its own work under ``if __name__ == "__main__"``.
      groups: those of ``plan_groups`` by default.

    Raises:
      FdoraError: the spec is out of range, a sample does not fit, a batch is empty, the groups do not hold each adapter once.
    """
    check_spec("jobs.schedule", spec)
    check_lengths("jobs.schedule", lengths, spec)
    lengths = [[list(batch) for batch in batches] for batches in lengths]
    # by content, so that names change nothing; equal adapters are interchangeable
    order = sorted(range(len(lengths)), key=lambda a: (lengths[a], a))
    number = {a: n for n, a in enumerate(order)}
    ranked = [lengths[a] for a in order]
    chosen: Groups
    if groups is None:
        chosen = plan_groups(ranked, spec)
    else:
        given = [sorted(group) for group in groups]
        trained = [a for a, batches in enumerate(lengths) if batches]
        named = sorted(a for group in given for a in group)
        if named not in (trained, [*range(len(lengths))]):
            raise fail("jobs.schedule", "groups", f"each of the adapters {trained} once", given, "Leave it out to plan them.")
        chosen = tuple(tuple(sorted(number[a] for a in group)) for group in given if group)
    rounds = [samples for _, samples in rounds_of(chosen, ranked)]
    packings = pack_all(rounds, spec)
    row = line_up(packings, spec)

    def own(sample: Sample) -> Sample:
        return sample._replace(adapter=order[sample.adapter])

    microbatches = tuple(tuple(sorted(map(own, each))) for each in row)
    faults = verify(microbatches, lengths, spec)
    if faults:
        raise RuntimeError(f"a bug in fdora.jobs.schedule, please report it with the lengths: {faults[0]}")
    packed = tuple(
        Packed(tuple(sorted({order[s.adapter] for s in samples})), len(p.microbatches), *p[1:])
        for samples, p in zip(rounds, packings, strict=True)
    )
    planned = tuple(tuple(sorted(order[a] for a in group)) for group in chosen)
    return Schedule(spec, planned, microbatches, packed)


def pack_all(rounds: list[list[Sample]], spec: Spec) -> list[Packing]:
    """Greedily first; what is left to the solver while there is time, where most is to be had first.

    The solver holds the interpreter while it works, so more than one at a time are processes, each with one packing.
    """
    packings = [greedy(samples, spec) for samples in rounds]
    open_ = [n for n, packing in enumerate(packings) if not settled(packing, spec)]
    open_.sort(key=lambda n: (packings[n].optimal, -packings[n].remainder, n))
    end = time.monotonic() + spec.seconds
    workers = min(spec.workers, cores(), len(open_)) if spec.seconds and available() else 1
    done = [solved(packing, spec._replace(seconds=0)) for packing in packings]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) if workers > 1 else None
    with pool or nullcontext():
        given = (packings[n] for n in open_), repeat(spec), repeat(end)
        found = pool.map(timely, *given) if pool else map(timely, *given)
        for n, packing in zip(progress(open_, "packings"), found, strict=True):
            done[n] = packing
    return done


def timely(packing: Packing, spec: Spec, end: float) -> Packing:
    """Until ``end`` of the clock that all processes of a machine have."""
    return solved(packing, spec._replace(seconds=max(0.0, min(spec.seconds, EACH, end - time.monotonic()))))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
