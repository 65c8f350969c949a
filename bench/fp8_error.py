"""What ``compute`` of "fp8", "mxfp8" and "nvfp4" lose: x (and dz) in 8 or 4 bits, against float64 on the same decoded weight.

    python -m bench.fp8_error [--json FILE]

Beside it what bfloat16 products lose, and what the weight's own 8 bits lose, which both share. On a CPU; the kernels compute
the same numbers (tests/triton/test_fp8.py). The inputs: normal numbers; tokens of sizes from 1 to 1000; and as transformers
have them, a few columns 50 times as large as the others.

``outliers``: one column of x is so many times as large; errors are relative to the output without that column, which is what
the others give. ``depth``: a stack of normed gated MLPs with residuals, W with scales of rows; errors of its state behind
so many layers, and of the gradient of that layer's B of down, with 8-bit products forward, and both ways.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F

from bench import truth
from bench.suite import Suite
from bench.truth import rel_l2
from fdora.functional import DoraLayer, dora_linear, dora_mlp, dora_norm
from fdora.quant import from_mxfp8, quantize

SCALES = {"tensor": None, "row": "row", "128 x 128": (128, 128)}
SCALED = ("mxfp8", "nvfp4")
INPUTS = ("normal", "tokens of many sizes", "large columns")
OUTLIERS = (1, 10, 30, 100, 300, 1000)
WAYS = {"bf16": {}, "fp8": {"compute": "fp8"}, "fp8 both ways": {"compute": "fp8", "grad_compute": "fp8"}}
S = 2.0


def inputs(kind, M, K):
    x = torch.randn(M, K)
    if kind == "tokens of many sizes":
        x *= 10 ** (3 * torch.rand(M, 1))
    if kind == "large columns":
        x[:, torch.randperm(K)[: max(1, K // 512)]] *= 50
    return x.bfloat16()


def coded(dense, scale):
    if scale in SCALES:
        return quantize(dense, "fp8", block=SCALES[scale], dtype=torch.bfloat16)
    if scale == "nvfp4":
        return quantize(dense, scale, dtype=torch.bfloat16)
    wide = dense.unflatten(1, (-1, 32))
    powers = torch.exp2((wide.abs().amax(2) / 448).log2().ceil())
    return from_mxfp8((wide / powers[..., None]).flatten(1).to(torch.float8_e4m3fn), powers.to(torch.float8_e8m0fnu))


def layer(scale, N, K, r):
    """A dense W, and the layer of its codes."""
    dense = torch.randn(N, K) / K**0.5
    W = coded(dense, scale)
    A, B = torch.randn(r, K) / K**0.5, torch.randn(N, r) / (50 * r**0.5)
    return dense, DoraLayer(W, A, B, dora_norm(W, A, B, s=S) * (1 + 0.05 * torch.randn(N)), S)


def exact(x, la, W=None):
    return truth.exact(x.double(), la.W.dequantize(torch.float64) if W is None else W, *la[1:4], S)


def errors(scale, kind, M, N, K, r):
    """In the Frobenius norm: of "fp8" or such, of bfloat16, and of the quantised weight against the one before."""
    dense, la = layer(scale, N, K, r)
    x, of = inputs(kind, M, K), "fp8" if scale in SCALES else scale
    want = exact(x, la)
    lost = {how or "bf16": rel_l2(dora_linear(x, *la[:4], s=S, compute=how), want) for how in (of, None)}
    return lost | {"weight": rel_l2(exact(x, la, dense), want)}


def with_outlier(scale, times, M, N, K, r):
    _, la = layer(scale, N, K, r)
    x = inputs("normal", M, K)
    x[:, K // 2] = 0
    unit = exact(x, la).norm()
    x[:, K // 2] = times * torch.randn(M).bfloat16()
    want = exact(x, la)
    off = {how or "bf16": dora_linear(x, *la[:4], s=S, compute=how).double() - want for how in ("fp8", None)}
    return {how: (each.norm() / unit).item() for how, each in off.items()}


def by_depth(count, M, width, wide, r):
    """Errors behind each of so many layers."""
    shapes = ((wide, width), (wide, width), (width, wide))
    stack = [[layer("row", *shape, r)[1] for shape in shapes] for _ in range(count)]
    x, target = torch.randn(M, width), torch.randn(M, width)

    def run(dtype, **how):
        h, states, Bs = x.to(dtype), [], []
        for three in stack:
            if dtype == torch.float64:
                three = [DoraLayer(la.W.dequantize(dtype), *(t.to(dtype) for t in la[1:4]), S) for la in three]
            Bs.append(three[2].B.detach().requires_grad_())
            h = h + dora_mlp(F.rms_norm(h, (width,)), *three[:2], three[2]._replace(B=Bs[-1]), **how)
            states.append(h.detach())
        return states, torch.autograd.grad((h * target.to(dtype)).sum(), Bs)

    want = run(torch.float64)
    for way, how in WAYS.items():
        for i, (h, dB) in enumerate(zip(*run(torch.bfloat16, **how), strict=True)):
            yield {"layers": i + 1, "way": way, "h": rel_l2(h, want[0][i]), "dB": rel_l2(dB, want[1][i])}


SIZES = (("tokens", 512), ("out", 1024), ("in", 4096), ("rank", 16))


OPTIONS = {
    **{f"--{name}": size for name, size in SIZES},
    "--layers": (16, "of the stack"),
}


def measure(run):
    sizes = {name: getattr(run.options, name) for name, _ in SIZES}
    torch.manual_seed(0)
    for kind, scale in run.cases(product(INPUTS, SCALES)):
        run.add({"x": kind, "scales": scale} | errors(scale, kind, *sizes.values()))
    M, N, K, r = sizes.values()
    for scale, times in product(SCALES, OUTLIERS):
        run.add({"scales": scale, "times": times} | with_outlier(scale, times, M, N, K, r), part="outliers")
    run.add(*by_depth(run.options.layers, M // 2, K // 8, N, r), part="depth")
    for kind, scale in product(INPUTS, SCALED):
        run.add({"x": kind, "scales": scale} | errors(scale, kind, *sizes.values()), part="scaled")
    run.set(sizes=sizes)


main = Suite(measure, OPTIONS, device=None)
