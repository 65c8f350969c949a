"""From lengths to a schedule."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from fdora._check import fail
from fdora._command import progress
from fdora.jobs.schedule import exact
from fdora.jobs.schedule.groups import Groups, line_up, plan_groups, rounds_of
from fdora.jobs.schedule.pack import greedy, settled, solved
from fdora.jobs.schedule.records import Lengths, Packed, Packing, Sample, Schedule, Spec, check_lengths, check_spec
from fdora.jobs.schedule.verify import verify

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
        Packed(tuple(sorted({order[s.adapter] for s in samples})), len(p.microbatches), p.bound, p.remainder, p.method, p.why)
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
    workers = min(spec.workers, cores(), len(open_)) if spec.seconds and exact.available() else 1

    def limited() -> Spec:
        return spec._replace(seconds=max(0.0, min(spec.seconds, EACH, end - time.monotonic())))

    done = [solved(packing, spec._replace(seconds=0)) for packing in packings]
    if workers <= 1:
        for n in progress(open_, "packings"):
            done[n] = solved(packings[n], limited())
        return done
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Packing], int] = {}
        bar = iter(progress(list(open_), "packings"))
        while open_ or running:
            while open_ and len(running) < workers and end > time.monotonic():
                n = open_.pop(0)
                running[pool.submit(solved, packings[n], limited())] = n
            if not running:
                break
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                done[running.pop(each)] = each.result()
                next(bar)
    return done


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
