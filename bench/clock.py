"""Clocks: GPU time of replayed CUDA graphs, and wall time of a loop of calls. Ways are timed in turns, medians are kept.

On a GPU a graph holds as many launches as make a replay about 2 ms long (50 at most). Short launches therefore run out of a
warm cache, the same for every way. Graphs share the memory of one anchor graph: none of their results is read again.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from bench.attempt import Failures

REPLAY_MS = 2.0
MOST_LAUNCHES = 50
LOOP_MS = 20.0
Timer = Callable[[], float]  # ms of one call


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """What nothing refers to any more."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def once(fn: Callable[[], object], device: str) -> float:
    """Wall ms of one call until the GPU is done."""
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def wall_timer(fn: Callable[[], object], device: str, loop_ms: float = LOOP_MS) -> Timer:
    """Host and device together: a loop of calls, one wait at its end."""

    def loop(calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        synchronize(device)
        return 1e3 * (time.perf_counter() - start) / calls

    loop(2)
    calls = max(1, min(1000, math.ceil(loop_ms / loop(2))))
    return lambda: loop(calls)


def anchor_graph() -> torch.cuda.CUDAGraph:
    """Keeps a memory pool alive whatever becomes of the graphs in it: torch does not take up a pool that was let go."""
    return capture(lambda: torch.zeros(1, device="cuda"), 1)


def capture(fn: Callable[[], object], launches: int, anchor: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=anchor and anchor.pool()):
        for _ in range(launches):
            fn()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def graph_timer(fn: Callable[[], object], anchor: torch.cuda.CUDAGraph | None = None) -> Timer:
    """GPU time only: no launch from the host."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    once = capture(fn, 1, anchor)
    replay_ms(once)
    launches = max(1, min(MOST_LAUNCHES, math.ceil(REPLAY_MS / replay_ms(once))))
    graph = capture(fn, launches, anchor)
    return lambda: replay_ms(graph) / launches


def launches_of(ms: float, at_least: int = 1) -> int:
    """How many launches of this length make a replay long enough."""
    return max(at_least, min(MOST_LAUNCHES, math.ceil(REPLAY_MS / ms)))


def quick_timer(fn: Callable[[], object], launches: int, anchor: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Timer:
    """As graph_timer, for searches: torch.cuda.graph collects garbage and empties the cache before every capture."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=anchor.pool())
        try:
            for _ in range(launches):
                fn()
        finally:
            graph.capture_end()
    return lambda: replay_ms(graph) / launches


def timer(fn: Callable[[], object], device: str, anchor: torch.cuda.CUDAGraph | None = None) -> Timer:
    return wall_timer(fn, device, 0) if device == "cpu" else graph_timer(fn, anchor)


def medians(timers: Mapping[str, Timer], runs: int) -> dict[str, float]:
    """Median ms of each, in turns; the first turn warms up."""
    turns = [{name: one() for name, one in timers.items()} for _ in range(runs + 1)]
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in timers}


def medians_of(
    fns: Mapping[str, Callable[[], object]], device: str, runs: int, failed: Failures | None = None
) -> dict[str, float]:
    """Median ms of each function, by the clock of this device. One that raises is an error, or listed as ``failed``."""
    anchor = None if device == "cpu" else anchor_graph()
    if failed is None:
        return medians({name: timer(fn, device, anchor) for name, fn in fns.items()}, runs)
    ms = medians(failed.attempt(fns, lambda name: timer(fns[name], device, anchor)), runs)
    return {name: round(value, 5) for name, value in ms.items()}
