"""Compare the ways to get the row norm: dense product, the factored form of the literature, tiles, and the kernel.

    python -m bench.norm_forms [--device cuda] [--json FILE]
    python -m bench.norm_forms --shapes 768x2048x64,2048x7168x384    # experts of Qwen3-30B-A3B and DeepSeek-V3
    python -m bench.norm_forms --kinds codes,bank,experts            # of NF4 codes; of MANY adapters on one W; of MANY W

Times are medians of runs taken in turns, on a GPU of replayed CUDA graphs (GPU time, no launch overhead); memory is the
allocator's peak beside the inputs; error is the worst row against float64. On a GPU the roof is printed too: the larger of
W's bytes over a measured copy and the product's flops over a measured cuBLAS product. ``loop`` is a call for each of several
norms, ``tree`` dora_norm_tree, ``unchanged`` that with a state which matches, so that the bits of A and B alone are read, and
``stack`` one call of dora_norm.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from bench.clock import medians_of
from bench.suite import Some, Suite
from bench.truth import norm_of
from bench.ways import S, away
from fdora.functional import dora_base_sqnorm, dora_norm, dora_norm_tree, dora_norm_tree_state, select_backend
from fdora.quant import quantize
from tests.memory import peak_bytes

SHAPES = ((4096, 4096, 16), (4096, 4096, 384), (1024, 4096, 64), (14336, 4096, 64), (8192, 8192, 384))
MANY = 4
ROUNDED = ("dense", "decoded")  # in W's dtype before it is summed
Forms = dict[str, Callable[[], Tensor]]


def dense(W, A, B):
    return torch.linalg.vector_norm(W + S * (B @ A), dim=1)


def weight(W: Tensor, r: int) -> tuple[Forms, Tensor]:
    A, B, *_ = away(W, r, W.dtype)
    base = dora_base_sqnorm(W)
    fns = {
        "dense": lambda: dense(W, A, B),
        "factored": lambda: dora_norm(W, A, B, s=S, base_sqnorm=base, backend="eager"),
        "tiles": lambda: dora_norm(W, A, B, s=S, backend="eager"),
    }
    if W.device.type != "cpu":
        fns.pop("factored")  # eager takes it where it may look at values
    if select_backend(W).name == "triton":
        fns["triton"] = lambda: dora_norm(W, A, B, s=S)
    return fns, norm_of(W, A, B, S)


def codes(W: Tensor, r: int) -> tuple[Forms, Tensor]:
    """Of NF4, beside W as it is decoded."""
    coded, (A, B, *_) = quantize(W, "nf4", nested=True), away(W, r, W.dtype)
    W = coded.dequantize(W.dtype)
    fns = {"codes": lambda: dora_norm(coded, A, B, s=S), "decoded": lambda: dora_norm(W, A, B, s=S)}
    return fns, norm_of(coded.dequantize(torch.float64), A, B, S)


def several(W: Tensor, r: int, own: bool) -> tuple[Forms, Tensor]:
    """Of adapters of one W, or of as many that have their own, as experts do."""
    stack = torch.stack([W.roll(i, 0) for i in range(MANY)]) if own else W.expand(MANY, *W.shape)
    A, B, *_ = away(stack, r, W.dtype)
    weights, pairs = list(stack), list(zip(A, B, strict=True))
    one, s = (stack, S) if own else (W, torch.full((MANY,), S, device=W.device))
    kept = dora_norm_tree(weights, pairs, s=S, state=dora_norm_tree_state(weights))
    fns = {
        "loop": lambda: torch.cat([dora_norm(w, *pair, s=S) for w, pair in zip(weights, pairs, strict=True)]),
        "tree": lambda: torch.cat(dora_norm_tree(weights, pairs, s=S)),
        "unchanged": lambda: torch.cat(dora_norm_tree(weights, pairs, s=S, state=kept).c),
        "stack": lambda: dora_norm(one, A, B, s=s).flatten(),
    }
    return fns, torch.cat([norm_of(w, *pair, S) for w, pair in zip(weights, pairs, strict=True)])


KINDS = {
    "weight": weight,
    "codes": codes,
    "bank": lambda W, r: several(W, r, False),
    "experts": lambda W, r: several(W, r, True),
}


def rows_of(kind, N, K, r, dtype, device, runs, facts):
    torch.manual_seed(0)
    W = torch.randn(N, K, device=device).mul_(K**-0.5).to(dtype)
    fns, truth = KINDS[kind](W, r)
    ms = medians_of(fns, device, runs)
    for name, fn in fns.items():
        error = ((fn().double() - truth).abs() / truth).max().item()
        assert name in ROUNDED or error <= 1e-6, f"{name} is wrong by {error:.1e}"
        row = {"kind": kind, "form": name, "N": N, "K": K, "r": r, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"ms": round(ms[name], 4), "peak_mb": round(peak_bytes(fn, device) / 2**20, 2), "error": float(f"{error:.1e}")}
        if device != "cpu" and dtype == torch.bfloat16 and kind == "weight":
            row["roof_ms"] = round(max(W.nbytes / facts["bytes_per_ms"], 2 * N * K * r / facts["flops_per_ms"]), 4)
        yield row


def measure(run):
    options = run.options
    for kind, shape, dtype in run.cases(product(options.kinds, options.shapes, (torch.float32, torch.bfloat16))):
        run.add(*rows_of(kind, *shape, dtype, options.device, options.runs, run.facts))


main = Suite(measure, {"--shapes": (list(SHAPES), "N x K x r"), "--kinds": Some(KINDS, ["weight"])}, runs=9)
