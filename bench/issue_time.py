"""Host time in a model: how long the CPU takes to issue a forward and a backward, the GPU never waited for in between.

    python -m bench.issue_time --device cuda --json FILE
    python -m bench.issue_time --device cuda --runs 1 --profile 30

Decoder layers and ways of bench.steps: 8 layers of width 2048 (56 adapted linears), 512 tokens, r 16. Every step begins with an
empty queue and new adapters (an optimizer step before it). Medians over the steps of a run, ways in turns; a run is repeated
with the ways in another order. ``excess`` is what a way takes beyond the frozen model, and ``ratio`` that as a share of what
PEFT's LoRA takes beyond it.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time

import torch

from bench.clock import synchronize
from bench.steps import SIZES, WAYS, Cell, Way, agreed, build, inputs, judged
from bench.suite import One, Run, Suite, stack
from bench.table import table

PARTS = ("forward", "backward")


def host_speed() -> float:
    """ms of two million additions in Python: hosts differ by a factor of two."""
    start = time.perf_counter()
    for k in range(2_000_000):
        k += 1
    return 1e3 * (time.perf_counter() - start)


def issue(way: Way, device: str) -> tuple[float, float]:
    """ms until forward, and then backward, is issued; from an empty queue, which is empty again afterwards."""
    way.optimize()
    synchronize(device)
    start = time.perf_counter()
    loss = way.loss()
    middle = time.perf_counter()
    torch.autograd.grad(loss, [way.x, *way.leaves.values()])
    end = time.perf_counter()
    synchronize(device)
    return 1e3 * (middle - start), 1e3 * (end - middle)


def one_run(ways: dict[str, Way], options) -> dict[str, dict[str, float]]:
    turns = [{name: issue(way, options.device) for name, way in ways.items()} for _ in range(options.steps + 2)][2:]
    return {
        name: {part: round(statistics.median(turn[name][i] for turn in turns), 3) for i, part in enumerate(PARTS)}
        for name in ways
    }


def excess(run: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Beyond the frozen model, and as a share of LoRA's."""
    found = {}
    if "frozen" not in run:
        return found
    for way in [way for way in run if way != "frozen"]:
        found[way] = {part: round(run[way][part] - run["frozen"][part], 3) for part in PARTS}
    lora = found.get("peft_lora", {})
    for parts in found.values():
        parts |= {f"{part}_ratio": round(parts[part] / lora[part], 3) for part in PARTS if lora.get(part, 0) > 0}
    return found


def profiled(way: Way, device: str, steps: int = 10) -> pstats.Stats:
    """Where forward spends it, by function; what is measured takes longer for being measured, Python more than C."""
    profile = cProfile.Profile()
    for _ in range(steps):
        way.optimize()
        synchronize(device)
        profile.enable()
        loss = way.loss()
        profile.disable()
        torch.autograd.grad(loss, [way.x, *way.leaves.values()])
    return pstats.Stats(profile).sort_stats("tottime")


OPTIONS = {
    **stack(8, WAYS, seq=512, r=16),
    "--model": One(SIZES, "2048"),
    "--steps": (15, "of each way in a run"),
    "--profile": (0, "show that many lines of a profile of each way's forward"),
}


def measure(run: Run) -> None:
    options = run.options
    cell = Cell(options.model, options.seq, options.r)
    ways = build(cell, options, run.failed)
    inputs(cell, ways, options)
    run.set(**cell._asdict(), layers=options.layers, steps=options.steps, runs=[], agreement={}, failed=run.failed)
    agreed(run, cell, ways)
    order = list(ways)
    for i in range(options.runs):
        turned = order[i % len(order) :] + order[: i % len(order)]
        ms = one_run({name: ways[name] for name in turned}, options)
        run.add({"python_ms": round(host_speed(), 1), "ms": ms, "excess": excess(ms)}, part="runs")
    print(markdown(run.result["runs"], order), f"\n\nfailed: {dict(run.failed)}")
    for name in order if options.profile else ():
        print(name)
        profiled(ways[name], options.device).print_stats(options.profile)


def markdown(runs: list[dict], order: list[str]) -> str:
    """A line per run and way: forward / backward."""

    def pair(parts: dict, ending: str = "") -> str:
        return " / ".join(f"{parts[part + ending]:.2f}" for part in PARTS if part + ending in parts)

    head = ["run", "way", "issue ms, forward / backward", "beyond frozen", "of LoRA's", "2M additions, ms"]
    lines = []
    for i, run in enumerate(runs):
        for way in order:
            beyond = run["excess"].get(way, {})
            lines.append([i, way, pair(run["ms"][way]), pair(beyond), pair(beyond, "_ratio"), run["python_ms"]])
    return table(head, lines)


main = Suite(measure, OPTIONS, runs=3, judge=judged)
