"""The ``measure`` fixture of the pytest-benchmark suite: checked first, then timed, with what it cost beside it.

    make bench                                                                          # small shapes, on the CPU
    make bench BENCH="--device cuda --benchmark-save before"
    make bench BENCH="--device cuda --benchmark-compare --benchmark-compare-fail=median:10%"   # red if slower than the last

The time in the table is GPU time: one launch of a CUDA graph after a write of more than the L2 cache holds, which also
hides the launch from the clock. On a CPU it is wall time. ``--commit`` is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from bench.clock import anchor_graph, capture, medians, wall_timer
from bench.norm_forms import about
from fdora.functional import select_backend
from tests.memory import peak_bytes

FLUSH_BYTES = 2**28  # five times the L2 of an H100, and 0.1 ms of writing


class Clock:
    """A timer that stands still but for the rounds that are measured."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()
ANCHOR: list[torch.cuda.CUDAGraph] = []


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="cpu or cuda")
    parser.addoption("--commit", help="recorded in extra_info")
    parser.addoption("--rounds", type=int, default=30)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def facts(request, device) -> dict:
    return about(device, request.config.getoption("--commit"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def cpu_round(fn: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start

    return once


def gpu_round(fn: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one launch: the events enter the queue while the cache is still being written."""
    for _ in range(2):
        fn()
    ANCHOR[:] = ANCHOR or [anchor_graph()]
    torch.cuda.synchronize()
    graph = capture(fn, 1, ANCHOR[0])
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return once


@pytest.fixture
def measure(benchmark, device, facts, request):
    """``measure(fn, bytes=, flops=, **what)``: what the fewest bytes and the products take is its roof, where measured."""

    def run(fn: Callable[[], object], *, bytes: int, flops: int, **what) -> None:
        rounds = request.config.getoption("--rounds")
        one_round = (cpu_round if device == "cpu" else gpu_round)(fn)

        def target() -> None:
            CLOCK.now += one_round()

        benchmark.pedantic(target, rounds=rounds, warmup_rounds=max(1, rounds // 5), iterations=1)
        what["dtype"] = str(what["dtype"]).removeprefix("torch.")
        info = facts | what | {"bytes": bytes, "flops": flops, "peak_mb": round(peak_bytes(fn, device) / 2**20, 3)}
        info["wall_ms"] = round(medians({"": wall_timer(fn, device, 0)}, 5)[""], 5)
        if "bytes_per_ms" in facts and what["dtype"] == "bfloat16" and benchmark.stats:
            info["roof_ms"] = round(max(bytes / facts["bytes_per_ms"], flops / facts["flops_per_ms"]), 5)
            info["of_roof"] = round(info["roof_ms"] / (1e3 * benchmark.stats.stats.median), 3)
        benchmark.extra_info.update(info)

    return run


@pytest.fixture(params=["eager", "triton"])
def backend(request, device) -> str:
    choice = select_backend(torch.empty(0, device=device))
    if request.param == "triton" and choice.name != "triton":
        pytest.skip(choice.reason)
    return request.param
