"""A layer's forward beside a kernel that holds some multiprocessors, as NCCL's do: by how its tiles are shared out.

    python -m bench.beside --device cuda [--json FILE]

Llama-3.1-8B's shapes, 4096 tokens, r = 64, bf16. ``alone`` and ``beside`` are GPU ms by events, medians of turns; ``beside``
a kernel on another stream that begins before the layer and ends after 1 ms or so, on ``held`` multiprocessors (24 are what
an all-gather of FSDP2 takes on two H200). ``one``: a program for each multiprocessor, what runs where there is one process;
``shared``: what runs where there are several; ``cublas``: x W^T alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest import mock

import torch
import triton
import triton.language as tl

from bench.suite import Suite
from fdora.functional import dora_linear
from fdora.triton import gemm
from fdora.triton.runtime import walk

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
TINY = ((48, 32),)
HELD, MS = 24, 1.0


@triton.jit
def hold_kernel(out, steps):
    a = tl.zeros((64, 64), tl.float16)
    acc = tl.zeros((64, 64), tl.float32)
    for _ in range(steps):
        acc = tl.dot(a, acc.to(tl.float16), acc)  # each waits for the one before
    i = tl.arange(0, 64)
    tl.store(out + i[:, None] * 64 + i[None, :], acc)


def ms_of(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    torch.cuda._sleep(300_000)  # the host is through with the launches before the GPU begins
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def holder() -> Callable[[], None]:
    """Starts the kernel on a stream of its own; it waits for nobody."""
    out, side = torch.empty(64, 64, device="cuda"), torch.cuda.Stream()

    def hold(steps: int) -> None:
        hold_kernel[(HELD,)](out, steps, num_warps=16)

    hold(1000)
    steps = int(1000 * MS / ms_of(lambda: hold(1000)))

    def beside() -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            hold(steps)

    return beside


def rows_of(N: int, K: int, tokens: int, r: int, device: str, runs: int) -> list[dict]:
    x, W, A, B = (torch.randn(shape, device=device).mul_(K**-0.5).bfloat16() for shape in ((tokens, K), (N, K), (r, K), (N, r)))
    g = torch.ones(N, device=device)
    rows = []
    for way in ("one", "shared", "cublas"):
        with mock.patch.object(gemm, "beside_others", lambda way=way: way == "shared"), mock.patch.object(walk, "_plans", {}):

            def call(way=way):
                return x @ W.T if way == "cublas" else dora_linear(x, W, A, B, g, s=1.0, norm=g)

            call()
            row = {"N": N, "K": K, "tokens": tokens, "r": r, "way": way, "held": HELD}
            if device != "cpu":
                beside = holder()
                row["alone"] = round(statistics.median(ms_of(call) for _ in range(runs)), 4)
                row["beside"] = round(statistics.median(ms_of(call, beside) for _ in range(runs)), 4)
        rows.append(row)
    return rows


@torch.no_grad()
def measure(run):
    device, runs = run.options.device, run.options.runs
    tiny = device == "cpu"  # untimed, for the tests
    for N, K in run.cases(TINY if tiny else SHAPES):
        run.add(*rows_of(N, K, 16 if tiny else 4096, 4 if tiny else 64, device, runs))


main = Suite(__doc__, measure, runs=15)


if __name__ == "__main__":
    main()
