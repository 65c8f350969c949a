"""A linear on an 8-bit W: products of codes (``compute="fp8"``) beside products of the decoded W, in time and in error.

    python -m bench.fp8 --device cuda --json FILE
    python -m bench.fp8 --device cuda --shapes 4096x4096 --M 16,4096 --json FILE

bf16 x and adapters, the norm given; ``fwd`` is the forward without gradients, ``fwd_bwd`` also the backward to x, A, B and
m. GPU time by CUDA graph (wall time on a CPU), ways in turns, medians. Errors are against float64 with
the weight as it is decoded: of another rounding of x and dz they say what it costs. The ways:

    linear      x W^T of a dense bf16 W
    lora        LoRA as PEFT has it, on a dense bf16 W
    scaled_mm   torch's own fast product of codes with scales of rows, x quantised already (where scales are those of rows)
    dense       dora_linear on the dense bf16 W
    decoded     dora_linear on the codes: decoded in the plan, products in bf16
    fp8         the same with compute="fp8": x quantised in the plan, products of codes
    fp8_grad    with grad_compute="fp8" too: dz quantised in the plan, dx by a product of codes
    fp8_transposed   the same on a W that keeps its codes transposed, too
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from bench.clock import medians_of
from bench.fp8_error import SCALES
from bench.suite import Run, Some, Suite, shapes
from bench.ways import BF16, Inputs, S, Way, against, by_mode, checked, differentiated, fdora, lora, ratios, truths
from fdora.functional import dora_norm
from fdora.quant import QuantWeight, quantize, with_transpose

BACKWARD = ("fp8_grad", "fp8_transposed")
E4M3 = torch.float8_e4m3fn


def scaled_mm(x: torch.Tensor, W: QuantWeight) -> torch.Tensor:
    """The product alone, of codes made before."""
    codes, scales = W.tensors
    by_row = (x.abs().amax(1, keepdim=True).float() / torch.finfo(E4M3).max).clamp_min(1e-12)
    x8 = (x.float() / by_row).to(E4M3)
    assert codes is not None and scales is not None
    return partial(
        torch._scaled_mm, x8, codes.T, scale_a=by_row, scale_b=scales.reshape(1, -1), out_dtype=BF16, use_fast_accum=True
    )


def ways_of(i: Inputs, W: QuantWeight) -> dict[str, Way]:
    dense, x, A, B = W.dequantize(BF16), i.x, i.A, i.B
    c = dora_norm(W, A.detach(), B.detach(), s=S)

    def dora(W, **how) -> Way:
        return fdora(i._replace(W=W), c, **how)

    return {
        "linear": differentiated(lambda: F.linear(x, dense), {"x": x}, i.dy, "frozen"),
        "lora": differentiated(lambda: lora(x, dense, A, B), {"x": x, "A": A, "B": B}, i.dy, "lora"),
        "dense": dora(dense),
        "decoded": dora(W),
        "fp8": dora(W, compute="fp8"),
        "fp8_grad": dora(W, compute="fp8", grad_compute="fp8"),
        "fp8_transposed": dora(with_transpose(W), compute="fp8", grad_compute="fp8"),
    }


def rows_of(M: int, K: int, N: int, r: int, scale: str, options) -> Iterator[dict]:
    """Forward, and forward with backward."""
    i = Inputs.random(M, K, N, r, BF16, options.device)
    W = quantize(i.W, "fp8", block=SCALES[scale], dtype=BF16)
    each = ways_of(i, W)
    ways, error, failed, *_ = checked(
        each,
        each.__getitem__,
        against(truths(i, W.dequantize(torch.float64))),
        math.inf,
        options.device,
    )
    for mode, fns in by_mode(ways):
        if mode not in options.modes:
            continue
        if mode == "fwd":
            fns = {name: fn for name, fn in fns.items() if name not in BACKWARD}
            if scale == "row" and options.device != "cpu":
                fns |= failed.attempt(["scaled_mm"], lambda _: scaled_mm(i.x.detach(), W))
        ms = medians_of(fns, options.device, options.runs, failed)
        row = {"M": M, "K": K, "N": N, "r": r, "scales": scale, "mode": mode, "ms": ms}
        yield row | {"ratio": ratios(ms, [(name, "lora") for name in ms]), "error": error, "failed": dict(failed)}


OPTIONS = {
    "--shapes": (shapes("4096x4096,4096x14336,14336x4096,8192x8192"), "K x N"),
    "--M": [16, 512, 4096],
    "--r": 64,
    "--modes": Some(("fwd", "fwd_bwd")),
    "--scales": (Some(SCALES, ["row", "128 x 128"]), "of W"),
}


def measure(run: Run) -> None:
    options = run.options
    for M, (K, N), scale in run.cases(product(options.M, options.shapes, options.scales)):
        run.add(*rows_of(M, K, N, options.r, scale, options))


main = Suite(measure, OPTIONS, runs=5)
