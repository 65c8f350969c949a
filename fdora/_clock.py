"""GPU time of replayed CUDA graphs, for searches and benchmarks: ways are timed in turns, medians are kept.

A graph holds as many launches as make a replay about 2 ms long (50 at most). Graphs share the memory of one anchor graph:
none of their results is read again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import torch

REPLAY_MS = 2.0
MOST_LAUNCHES = 50
Timer = Callable[[], float]  # ms of one call


def anchor_graph() -> torch.cuda.CUDAGraph:
    """Keeps a memory pool alive whatever becomes of the graphs in it: torch does not take up a pool that was let go."""
    return capture(lambda: torch.zeros(1, device="cuda"), 1)


def capture(fn: Callable[[], object], launches: int, anchor: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None if anchor is None else anchor.pool()):
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


def launches_of(ms: float, at_least: int = 1) -> int:
    """How many launches of this length make a replay long enough."""
    return max(at_least, min(MOST_LAUNCHES, math.ceil(REPLAY_MS / ms)))


def quick_timer(fn: Callable[[], object], launches: int, anchor: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Timer:
    """For searches: torch.cuda.graph collects garbage and empties the cache before every capture."""
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


def medians(timers: Mapping[str, Timer], runs: int) -> dict[str, float]:
    """Median ms of each, in turns; the first turn warms up."""
    turns = [{name: one() for name, one in timers.items()} for _ in range(runs + 1)]
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in timers}
