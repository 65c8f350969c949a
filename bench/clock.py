"""Clocks: GPU time of replayed CUDA graphs, and wall time of a loop of calls. Ways are timed in turns, medians are kept.

On a GPU a graph holds as many launches as make a replay about 2 ms long (50 at most). Short launches therefore run out of a
warm cache, the same for every way. Graphs share the memory of one anchor graph: none of their results is read again.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from fdora._clock import Timer, anchor_graph, capture, launches_of, medians, replay_ms
from fdora._clock import quick_timer as quick_timer

T = TypeVar("T")


class Failures(dict[str, str]):
    """Reason by way."""

    def attempt(self, names: Iterable[str], step: Callable[[str], T], label: str = "{}") -> dict[str, T]:
        """``step(name)`` for each name, without those that raise: their reason is kept under this label, which says where."""
        results = {}
        for name in names:
            try:
                results[name] = step(name)
            except Exception as problem:  # whatever a rival may raise
                self[tag := label.format(name)] = (f"{type(problem).__name__}: {problem}".splitlines() or ["?"])[0][:300]
                print(f"{tag} failed: {self[tag]}", flush=True)
        return results


LOOP_MS = 20.0


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


def graph_timer(fn: Callable[[], object], anchor: torch.cuda.CUDAGraph | None = None) -> Timer:
    """GPU time only: no launch from the host."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    once = capture(fn, 1, anchor)
    replay_ms(once)
    launches = launches_of(replay_ms(once))
    graph = capture(fn, launches, anchor)
    return lambda: replay_ms(graph) / launches


def timer(fn: Callable[[], object], device: str, anchor: torch.cuda.CUDAGraph | None = None) -> Timer:
    return wall_timer(fn, device, 0) if device == "cpu" else graph_timer(fn, anchor)


def medians_of(
    fns: Mapping[str, Callable[[], object]], device: str, runs: int, failed: Failures | None = None
) -> dict[str, float]:
    """Median ms of each function, by the clock of this device. One that raises is an error, or listed as ``failed``."""
    anchor = None if device == "cpu" else anchor_graph()
    if failed is None:
        return medians({name: timer(fn, device, anchor) for name, fn in fns.items()}, runs)
    ms = medians(failed.attempt(fns, lambda name: timer(fns[name], device, anchor)), runs)
    return {name: round(value, 5) for name, value in ms.items()}
