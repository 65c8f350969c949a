"""What ``dora_linear(compute="fp8")`` loses of the output: x as 8-bit numbers, against float64 on the same decoded weight.

    python -m bench.fp8_error [--json FILE]

Beside it what bfloat16 products lose, and what the weight's own 8 bits lose, which both share. On a CPU; the kernels compute
the same numbers (tests/triton/test_fp8.py). The inputs: normal numbers; tokens of sizes from 1 to 1000; and as transformers
have them, a few columns 50 times as large as the others.
"""

from __future__ import annotations

from itertools import product

import torch

from bench.suite import Suite
from fdora.functional import dora_linear, dora_norm
from fdora.quant import quantize

SCALES = {"tensor": None, "row": "row", "128 x 128": (128, 128)}
INPUTS = ("normal", "tokens of many sizes", "large columns")
S = 2.0


def inputs(kind, M, K):
    x = torch.randn(M, K)
    if kind == "tokens of many sizes":
        x *= 10 ** (3 * torch.rand(M, 1))
    if kind == "large columns":
        x[:, torch.randperm(K)[: max(1, K // 512)]] *= 50
    return x.bfloat16()


def errors(scale, kind, M, N, K, r):
    """Relative, in the Frobenius norm: of "fp8", of bfloat16, and of the quantised weight against the one before."""
    dense = torch.randn(N, K) / K**0.5
    W = quantize(dense, "fp8", block=SCALES[scale], dtype=torch.bfloat16)
    A, B = torch.randn(r, K) / K**0.5, torch.randn(N, r) / (50 * r**0.5)
    m = dora_norm(W, A, B, s=S) * (1 + 0.05 * torch.randn(N))
    x = inputs(kind, M, K)

    def exact(weight):
        full = weight.double() + S * B.double() @ A.double()
        return x.double() @ ((m.double() / full.norm(dim=1))[:, None] * full).T

    truth = exact(W.dequantize(torch.float64))
    lost = {how or "bf16": dora_linear(x, W, A, B, m, s=S, compute=how).double() - truth for how in ("fp8", None)}
    lost["weight"] = exact(dense) - truth
    return {how: (each.norm() / truth.norm()).item() for how, each in lost.items()}


SIZES = (("tokens", 512), ("out", 1024), ("in", 4096), ("rank", 16))


OPTIONS = {
    **{f"--{name}": size for name, size in SIZES},
}


def measure(run):
    sizes = {name: getattr(run.options, name) for name, _ in SIZES}
    torch.manual_seed(0)
    for kind, scale in run.cases(product(INPUTS, SCALES)):
        run.add({"x": kind, "scales": scale} | errors(scale, kind, *sizes.values()))
    run.set(sizes=sizes)


main = Suite(measure, OPTIONS, device=None)
