"""Schedules of many adapters: how full, how idle the pipeline, how long they take to find. On a CPU, without tensors.

    python -m bench.schedule --json FILE
    python -m bench.schedule --samples 8 --capacity 4096 --depth 2

Lengths are drawn log-normally, by median and spread of four kinds of summarised text (short, even, long, mixed), from the 32
lengths that LoRAFusion's source gives as examples. For one to four adapters, which start with each kind in turn (means are
reported), four ways through 1F1B with times that are proportional to tokens:

- flushed: one batch of one adapter after the other, each packed first-fit, the pipeline empty in between;
- side by side: a microbatch has one adapter; rounds of all adapters, gaps where they must be;
- schedule: ``fdora.jobs.schedule``;
- half: the same with half the capacity, or what the longest sample wants. Microbatches this small must pay on the GPU.

What the paper reports was measured on its machines and texts, so it stands beside ours and is not the same experiment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from math import log
from statistics import mean

from bench.suite import One, Suite, tables
from fdora.jobs.schedule import Sample, Spec, Timeline, insert_noops, schedule, simulate
from fdora.jobs.schedule.pack import first_fit
from fdora.jobs.schedule.whole import rounds_of

KINDS = {"short": (486, 0.70), "even": (803, 0.34), "long": (1601, 0.31), "mixed": (882, 0.56)}  # median, spread of the log
OTHERS = {"metamath": (185, 0.50)}  # 210 in the mean, as results of PEFT's comparison count them; the spread is a guess
PAPER = (
    "The paper measured these bubbles of a 70B on four H100: 44.17 % with one adapter, 15.00 % with two, 12.23 % with three, "
    "11.09 % with four; Megatron's 1F1B 48.79 %, mLoRA 34.11 %."
)
WAYS = ("flushed", "side by side", "schedule", "half")
SEEDS = 3


def drawn(kinds: list[str], batches: int, samples: int, capacity: int, seed: int) -> list[list[list[int]]]:
    rng = random.Random(seed)

    def length(kind: str) -> int:
        median, spread = (KINDS | OTHERS)[kind]
        return min(capacity, max(16, round(rng.lognormvariate(log(median), spread))))

    return [[[length(kind) for _ in range(samples)] for _ in range(batches)] for kind in kinds]


def alone(lengths: list[list[list[int]]]) -> list[list[Sample]]:
    """The batches of all adapters, by turns."""
    return [samples for _, samples in rounds_of(tuple((a,) for a in range(len(lengths))), lengths)]


def of(runs: list[Timeline], count: int, noops: int, spec: Spec, bound: int) -> dict:
    """One row: pipelines one after the other."""
    took = sum(run.time for run in runs)
    tokens = sum(run.throughput * run.time for run in runs)
    bubble = sum(run.bubble * run.time for run in runs) / took
    fill = tokens / (count * spec.capacity)
    return {"microbatches": count, "noops": noops, "bound": bound, "fill": fill, "bubble": bubble, "throughput": tokens / took}


def row(lengths: list[list[list[int]]], spec: Spec) -> Iterator[tuple[str, dict]]:
    run = partial(simulate, stages=spec.depth)
    each = [first_fit(samples, spec) for samples in alone(lengths)]
    beside = insert_noops([*chain(*each)], spec)
    found = schedule(lengths, spec)
    longest = max(n for batches in lengths for batch in batches for n in batch)
    small = spec._replace(capacity=max(spec.capacity // 2, longest + -longest % spec.multiple))
    halves = schedule(lengths, small)
    yield "flushed", of([*map(run, each)], sum(map(len, each)), 0, spec, found.bound)
    noops = sum(not each for each in beside)
    yield "side by side", of([run(beside)], len(beside), noops, spec, found.bound)
    yield "schedule", of([run(found)], len(found.microbatches), found.noops, spec, found.bound)
    yield "half", of([run(halves)], len(halves.microbatches), halves.noops, small, halves.bound)


def rows(spec: Spec, batches: int, samples: int) -> Iterator[dict]:
    kinds = list(KINDS)
    for count in range(1, len(kinds) + 1):
        runs = {}
        for start in range(len(kinds)):
            several = [kinds[(start + i) % len(kinds)] for i in range(count)]
            for seed in range(SEEDS):
                for way, found in row(drawn(several, batches, samples, spec.capacity, seed), spec):
                    runs.setdefault(way, []).append(found)
        for way, found in runs.items():
            yield {"adapters": count, "way": way} | {key: mean(each[key] for each in found) for key in found[0]}


def timed(spec: Spec, total: int, samples: int) -> Iterator[dict]:
    """How long a long schedule takes: greedily, and with the solver."""
    lengths = drawn(list(KINDS), total // (samples * len(KINDS)), samples, spec.capacity, 0)
    for seconds, workers in ((0.0, 1), (10.0, 1), (10.0, 2)):
        start = time.perf_counter()
        found = schedule(lengths, spec._replace(seconds=seconds, workers=workers))
        took = time.perf_counter() - start
        exact = sum(each.method == "exact" for each in found.packings)
        facts = {"samples": total, "solver_s": seconds, "workers": workers, "s": round(took, 2)}
        packed = sum(each.microbatches for each in found.packings)
        facts |= {"packings": len(found.packings), "exact": exact, "packed": packed}
        yield facts | {"microbatches": len(found.microbatches), "bound": found.bound, "noops": found.noops, "fill": found.fill}


OPTIONS = {
    "--device": One(("cpu",), "cpu"),
    "--capacity": 6144,
    "--depth": 4,
    "--multiple": 128,
    "--samples": 16,
    "--batches": 12,
    "--total": (25600, "samples of the schedule that is timed; 0: none"),
}


def measure(run):
    a = run.options
    spec = Spec(a.capacity, a.depth, a.multiple, 0.0)
    run.set("capacity", "depth", "multiple", "samples", "batches")
    run.add(*rows(spec, a.batches, a.samples))
    run.add(*(timed(spec, a.total, a.samples) if a.total else ()), part="times")


main = Suite(measure, OPTIONS, device=None, show=lambda found: f"{PAPER}\n\n{tables(found)}")
