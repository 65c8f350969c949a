"""A linear on an 8-bit W: products of codes (``compute="fp8"``) beside products of the decoded W, in time and in error.

    python -m bench.fp8 --device cuda --json FILE
    python -m bench.fp8 --device cuda --shapes 4096x4096 --M 16,4096 --json FILE

bf16 x and adapters, forward without gradients, the norm given. GPU time by CUDA graph (wall time on a CPU), ways in turns,
medians. The errors are those of y against float64 of some tokens, with the weight as it is decoded: of another rounding of x
they say what it costs. The ways:

    linear      x W^T of a dense bf16 W
    lora        LoRA as PEFT has it, on a dense bf16 W
    scaled_mm   torch's own fast product of codes with scales of rows, x quantised already (where scales are those of rows)
    dense       dora_linear on the dense bf16 W
    decoded     dora_linear on the codes: decoded in the plan, products in bf16
    fp8         the same with compute="fp8": x quantised in the plan, products of codes
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from bench.attempt import Failures
from bench.clock import medians_of
from bench.fp8_error import SCALES
from bench.layer import truths
from bench.suite import Run, Some, Suite, shapes
from bench.ways import BF16, Inputs, S
from fdora.functional import dora_linear, dora_norm
from fdora.quant import QuantWeight, quantize

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


def row_of(M: int, K: int, N: int, r: int, scale: str, options: argparse.Namespace) -> dict:
    i = Inputs.random(M, K, N, r, BF16, options.device)
    W = quantize(i.W, "fp8", block=SCALES[scale], dtype=BF16)
    dense, x = W.dequantize(BF16), i.x.detach()
    A, B, m = (t.detach() for t in (i.A, i.B, i.m))
    c = dora_norm(W, A, B, s=S)
    fns = {
        "linear": partial(F.linear, x, dense),
        "lora": lambda: F.linear(x, dense) + F.linear(F.linear(x, A), B) * S,
        "dense": partial(dora_linear, x, dense, A, B, m, s=S, norm=c),
        "decoded": partial(dora_linear, x, W, A, B, m, s=S, norm=c),
        "fp8": partial(dora_linear, x, W, A, B, m, s=S, norm=c, compute="fp8"),
    }
    failed, error = Failures(), {}
    if scale == "row" and options.device != "cpu":
        fns |= failed.attempt(["scaled_mm"], lambda _: scaled_mm(x, W))
    exact = truths(i, W.dequantize(torch.float64))
    with torch.no_grad():
        for name, y in failed.attempt(fns, lambda name: fns[name]()).items():
            want = exact[{"linear": "frozen", "scaled_mm": "frozen", "lora": "lora"}.get(name, "dora")]
            error[name] = float(f"{want.errors({'y': y})['y']:.2e}")
        ms = medians_of({name: fns[name] for name in error}, options.device, options.runs, failed)
    row = {"M": M, "K": K, "N": N, "r": r, "scales": scale, "ms": ms}
    return row | {"error": error, "failed": dict(failed)}


OPTIONS = {
    "--shapes": (shapes("4096x4096,4096x14336,14336x4096,8192x8192"), "K x N"),
    "--M": [16, 512, 4096],
    "--r": 64,
    "--scales": (Some(SCALES, ["row", "128 x 128"]), "of W"),
}


def measure(run: Run) -> None:
    options = run.options
    for M, (K, N), scale in run.cases(product(options.M, options.shapes, options.scales)):
        run.add(row_of(M, K, N, options.r, scale, options))


main = Suite(__doc__, measure, OPTIONS, runs=5)


if __name__ == "__main__":
    main()
