"""Compare the ways to get the row norm: dense product, the factored form of the literature, tiles, and the kernel.

    python -m bench.norm_forms [--device cuda] [--json FILE]
    python -m bench.norm_forms --shapes 768x2048x64,2048x7168x384    # experts of Qwen3-30B-A3B and DeepSeek-V3

Times are medians of runs taken in turns, on a GPU of replayed CUDA graphs (GPU time, no launch overhead); memory is the
allocator's peak beside the inputs; error is the worst row against float64. On a GPU the roof is printed too: the larger of
W's bytes over a measured copy and the product's flops over a measured cuBLAS product.
"""

from __future__ import annotations

from itertools import product

import torch

from bench.clock import medians_of
from bench.suite import Suite
from bench.truth import norm_of
from bench.ways import S, away
from fdora.functional import dora_base_sqnorm, dora_norm, select_backend
from tests.memory import peak_bytes

SHAPES = ((4096, 4096, 16), (4096, 4096, 384), (1024, 4096, 64), (14336, 4096, 64), (8192, 8192, 384))


def dense(W, A, B):
    return torch.linalg.vector_norm(W + S * (B @ A), dim=1)


def rows_of(N, K, r, dtype, device, runs, facts):
    torch.manual_seed(0)
    W = torch.randn(N, K, device=device).mul_(K**-0.5).to(dtype)
    A, B, *_ = away(W, r, dtype)
    truth = norm_of(W, A, B, S)
    base = dora_base_sqnorm(W)
    fns = {
        "dense": lambda: dense(W, A, B),
        "factored": lambda: dora_norm(W, A, B, s=S, base_sqnorm=base, backend="eager"),
        "tiles": lambda: dora_norm(W, A, B, s=S, backend="eager"),
    }
    if device != "cpu":
        fns.pop("factored")  # eager takes it where it may look at values
    if select_backend(W).name == "triton":
        fns["triton"] = lambda: dora_norm(W, A, B, s=S)
    ms = medians_of(fns, device, runs)
    for name, fn in fns.items():
        error = ((fn().double() - truth).abs() / truth).max().item()
        assert name == "dense" or error <= 1e-6, f"{name} is wrong by {error:.1e}"
        row = {"form": name, "N": N, "K": K, "r": r, "dtype": str(dtype).removeprefix("torch."), "ms": round(ms[name], 4)}
        row |= {"peak_mb": round(peak_bytes(fn, device) / 2**20, 2), "error": float(f"{error:.1e}")}
        if device != "cpu" and dtype == torch.bfloat16:
            row["roof_ms"] = round(max(W.nbytes / facts["bytes_per_ms"], 2 * N * K * r / facts["flops_per_ms"]), 4)
        yield row


def measure(run):
    device = run.options.device
    for shape, dtype in run.cases(product(run.options.shapes, (torch.float32, torch.bfloat16))):
        run.add(*rows_of(*shape, dtype, device, run.options.runs, run.facts))


main = Suite(measure, {"--shapes": (list(SHAPES), "N x K x r")}, runs=9)
