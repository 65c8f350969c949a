"""Lengths that never repeat: a step of each of many lengths, when it comes for the first time and when it comes again.

    python -m bench.lengths --device cuda --json FILE
    python -m bench.lengths --device cuda --warmup

Decoder layers and ways of bench.steps. ``count`` lengths from 60 to 4000, evenly drawn on a logarithmic scale, in one order for
all ways, which take turns at each; wall time of each step until the GPU is done, with an optimizer step in it. First round: no
length was there before. Second: all of them again. ``first`` and ``again`` are sums over the lengths behind the first 20,
``begin`` that of the first 20, in the first round. ``worst``: the largest step of ``first`` over the median that steps of the
nearest lengths take in ``again``. What was made before the first step is kept out of Python's garbage collector (gc.freeze),
which otherwise stops a step of any way for half a second now and then. With ``--warmup``, fdora.warmup comes before, and a row
says how long it took. cuDNN's attention plans each new length for 94 ms on an H200, whatever the way; ``--no-cudnn`` leaves it
out of torch's choice.
"""

from __future__ import annotations

import gc
import math
import random
import statistics

import torch

from bench.clock import once
from bench.steps import SIZES, WAYS, Cell, Way, agreed, build, inputs, judged
from bench.suite import One, Run, Suite, stack
from fdora.integrations.peft import warmup

BEGIN = 20  # steps that may compile
NEAR = 11  # lengths whose median a step is compared with


def drawn(count: int, least: int, most: int) -> list[int]:
    generator = random.Random(0)
    return [round(math.exp(generator.uniform(math.log(least), math.log(most)))) for _ in range(count)]


def turns(lengths: list[int], ways: dict[str, Way], options) -> dict[str, list[float]]:
    """ms of each way's steps. Every length begins with another way."""
    names, found = list(ways), {name: [] for name in ways}
    for i, S in enumerate(lengths):
        inputs(Cell(options.model, S, options.r), ways, options)
        at = i % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(once(ways[name].step, options.device))
    return found


def worst(lengths: list[int], first: list[float], again: list[float]) -> tuple[float, int]:
    """The largest step behind the first over its neighbours', and its length."""

    def usual(S: int) -> float:
        near = sorted(range(len(lengths)), key=lambda i: abs(math.log(lengths[i] / S)))[:NEAR]
        return statistics.median(again[i] for i in near)

    return max((first[i] / usual(S), S) for i, S in enumerate(lengths) if i >= BEGIN)


def measure(run: Run) -> None:
    options = run.options
    cell = Cell(options.model, options.most, options.r)
    torch.backends.cuda.enable_cudnn_sdp(not options.no_cudnn)
    run.set("layers", "dtype", "adapter", agreement={}, failed=run.failed)
    ways = build(cell, options, run.failed)
    lengths = drawn(options.count, options.least, options.most)
    for name in [name for name in ways if options.warmup and "fdora" in name]:
        with ways[name].context():
            done = warmup(ways[name].model, range(options.least, options.most + 1))
        run.add({"way": name, "warmup_s": round(done.seconds, 2), "kernels": done.kernels})
    gc.collect()
    gc.freeze()
    first, again = turns(lengths, ways, options), turns(lengths, ways, options)
    for name in ways:
        sums = {key: sum(each[name][BEGIN:]) for key, each in (("first", first), ("again", again))}
        row = {"way": name, "begin_ms": sum(first[name][:BEGIN]), **{f"{key}_ms": ms for key, ms in sums.items()}}
        found, at = worst(lengths, first[name], again[name])
        row |= {"ratio": sums["first"] / sums["again"], "worst": found, "worst_at": at}
        run.add({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    inputs(cell, ways, options)
    agreed(run, cell, ways)


OPTIONS = {
    **stack(2, WAYS, seq=None),
    "--model": One(SIZES, "8b"),
    "--r": 64,
    "--count": 120,
    "--least": 60,
    "--most": 4000,
    "--warmup": (False, "fdora.warmup before the first step"),
    "--no-cudnn": (False, "attention by another way than cuDNN's"),
}

main = Suite(measure, OPTIONS, judge=judged)
