"""The ``measure`` fixture of the pytest-benchmark suite: checked first, then timed, with what it cost beside it.

    make bench                                                                          # small shapes, on the CPU
    make bench BENCH="--device cuda --benchmark-save before"
    make bench BENCH="--device cuda --benchmark-compare --benchmark-compare-fail=median:10%"   # red if slower than the last

The time in the table is GPU time: one launch of a CUDA graph after a write of more than the L2 cache holds, which also
hides the launch from the clock. On a CPU it is wall time. ``--commit`` is recorded. ``-k triton`` leaves plain torch out.
``--json FILE`` writes what the other commands write, after every case; no result names the machine it ran on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import fdora
from bench.clock import anchor_graph, capture, medians, once, wall_timer
from bench.records import save
from bench.suite import about
from fdora.functional import select_backend
from tests.memory import peak_bytes

FLUSH_BYTES = 2**28  # five times the L2 of an H100, and 0.1 ms of writing


class Clock:
    """A timer that stands still but for the rounds that are measured."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()
START = time.perf_counter()
ANCHOR = []


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="cpu or cuda")
    parser.addoption("--commit", help="recorded in extra_info")
    parser.addoption("--rounds", type=int, default=30)
    parser.addoption("--seconds", type=float, default=math.inf, help="start no case after this time")
    parser.addoption("--json", type=Path)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_benchmark_generate_machine_info():
    return {}  # it would name the host; extra_info says what matters


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def facts(request, device) -> dict:
    return about(device, request.config.getoption("--commit"))


@pytest.fixture(scope="session")
def result(request, facts) -> dict:
    return {"about": facts, "rounds": request.config.getoption("--rounds"), "rows": [], "skipped": []}


@pytest.fixture(autouse=True)
def _seed(result):
    torch.manual_seed(0)  # after the facts, which draw numbers


@pytest.fixture
def in_time(request, result) -> None:
    options = request.config.option
    if time.perf_counter() - START > options.seconds:
        result["skipped"].append(request.node.name)
        save(options.json, result)
        pytest.skip(f"not started within {options.seconds:.0f} s")


def gpu_round(fn: Callable[[], object]) -> Callable[[], float]:
    """ms of one launch: the events enter the queue while the cache is still being written."""
    for _ in range(2):
        fn()
    ANCHOR[:] = ANCHOR or [anchor_graph()]
    torch.cuda.synchronize()
    graph = capture(fn, 1, ANCHOR[0])
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def one() -> float:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return one


@pytest.fixture
def measure(benchmark, device, facts, result, request):
    """``measure(fn, bytes=, flops=, **what)``: its roof is what the fewest bytes take, or in bf16 the products if that is more.

    The roofs are measured. float32 products have none of their own: here they run as several in half precision.
    """
    options = request.config.option

    def run(fn: Callable[[], object], *, bytes: int, flops: int, **what) -> None:
        one_round = partial(once, fn, device) if device == "cpu" else gpu_round(fn)

        def target() -> None:
            CLOCK.now += one_round() / 1e3

        benchmark.pedantic(target, rounds=options.rounds, warmup_rounds=max(1, options.rounds // 5), iterations=1)
        if benchmark.stats is None:  # --benchmark-disable
            return
        what["dtype"] = str(what["dtype"]).removeprefix("torch.")
        row = what | {"bytes": bytes, "flops": flops, "peak_mb": round(peak_bytes(fn, device) / 2**20, 3)}
        ms = 1e3 * benchmark.stats.stats.median
        row |= {"ms": round(ms, 5), "wall_ms": round(medians({"": wall_timer(fn, device, 0)}, 5)[""], 5)}
        if "bytes_per_ms" in facts:
            products = flops / facts["flops_per_ms"] if what["dtype"] == "bfloat16" else 0.0
            row["roof_ms"] = round(max(bytes / facts["bytes_per_ms"], products), 5)
            row["of_roof"] = round(row["roof_ms"] / ms, 3)
        benchmark.extra_info.update(facts | row)
        result["rows"].append(row)
        save(options.json, result)

    return run


@pytest.fixture(params=["eager", "triton"])
def backend(request, device, in_time) -> Iterator[str]:
    choice = select_backend(torch.empty(0, device=device))
    if request.param == "triton" and choice.name != "triton":
        pytest.skip(f"{choice.reason}; runs with --device cuda")
    with fdora.backend(request.param):
        yield request.param
