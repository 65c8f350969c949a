"""Least time and memory of one layer: what its multiplications and its bytes cost at a GPU's published rates.

A step is a list of operations, each with its flops and the bytes it reads and writes. With the rates of the GPU

    time = sum over operations of max(flops / rate, bytes / bandwidth)

It is a floor, not a measurement: no launch is counted, and no product reaches the published rate. What it is good for is
to compare ways on one shape. M tokens, W (N, K), rank r, e bytes per element (2: bfloat16, of weights and adapters alike); no
bias, no dropout. Elements in brackets, flops before them; "+" joins operations.

    base      2 M N K [MK + NK + MN]
    h         2 M K r [MK + rK + Mr]        h = x A^T
    lora      2 M N r [Mr + Nr + MN]        h B^T
    dh        2 M N r [MN + Nr + Mr]        dlora B
    dA, dB    2 M K r [Mr + MK + rK] + 2 M N r [MN + Mr + Nr]
    dx        2 M N K [MN + NK + MK]

    LoRA      forward   base + h + lora + s * lora [2MN] + sum [3MN]
              backward  s * dy [2MN] + dh + dA, dB + dh A: 2 M K r [Mr + rK + MK] + dx + their sum [3MK]
              keeps     x, h                e (MK + Mr)
    PEFT DoRA as in peft 0.21: the dense B A of every call by two products with the identity, one operation per pass
              forward   base + h + lora + norm + compose;  compose [12MN]: (g - 1) base, g lora, times s, and two sums
                        norm  eye [KK] + 2 K K r [KK + 2Kr] + 2 K N r [Kr + Nr + NK] + s BA [2NK] + W + sBA [3NK] + norm [NK]
              backward  compose [17MN]: products with g and s, two sums over tokens for dg, one sum of dy; then as LoRA
              keeps     x, h, base, lora    e (MK + Mr + 2MN)
    fdora     forward   norm 2 N K r [NK + rK + Nr] + h + y: 2 M N (K + r) [MK + NK + Mr + Nr + MN]
              up to 64 tokens h and y in one pass over W: 2 M (N K + K r + N r) [MK + NK + rK + Nr + Mr + MN];
                        up to r = 64 on Hopper the norm out of the same pass: no bytes of its own
              backward  dz and dm [3MN, from M = 2K on dm and g W: 2MN + 2NK], dB with it [Mr + Nr] up to r = 64, apart
                        above + dh + dA + dx: 2 M K (N + r) [MN + NK + Mr + rK + MK]
              keeps     x, h, and y         e (MK + Mr) + e MN; without a bias y is the output itself, which costs nothing
                                            where the next operation keeps its input

The rates are those of :mod:`fdora.rates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from fdora._check import fail
from fdora.rates import GPUS as GPUS
from fdora.rates import Gpu as Gpu
from fdora.rates import gpu_of as gpu_of

Method = Literal["fdora", "lora", "peft_dora"]


FEW = 64  # tokens up to which one pass over W does it all
INSIDE = 64  # rank up to which that pass forms the norm, on Hopper
FUSE_DB = 64  # rank up to which backward's elementwise pass forms dB too
Op = tuple[float, float]  # flops, elements


class Prediction(NamedTuple):
    """``path``: what runs, in words. Seconds. Bytes that stay until backward: ``output`` those of y, ``kept`` all others."""

    path: str
    forward: float
    backward: float
    kept: int
    output: int = 0


def product(M: int, N: int, K: int) -> Op:
    """Of (M, K) and (K, N)."""
    return 2 * M * N * K, M * K + N * K + M * N


def operations(
    M: int, N: int, K: int, r: int, method: Method, fused_norm: bool
) -> tuple[str, Sequence[Op], Sequence[Op], int, int]:
    """The formulas at the head of this file: path, forward, backward, elements that are kept beside the output, and its own."""
    base, h, lora, kept = product(M, N, K), product(M, r, K), product(M, N, r), M * K + M * r
    dh, dA, dB = lora, h, lora  # the same sizes, other roles
    stock_backward: list[Op] = [dh, dA, dB, h, base, (0, 3 * M * K)]
    if method == "lora":
        forward = [base, h, lora, (0, 2 * M * N), (0, 3 * M * N)]
        return "PEFT", forward, [(0, 2 * M * N), *stock_backward], kept, 0
    if method == "peft_dora":
        passes = [(0, n * N * K) for n in (2, 3, 1)]
        forward = [base, h, lora, (0, K * K), product(K, K, r), product(K, N, r), *passes, (0, 12 * M * N)]
        return "PEFT", forward, [(0, 17 * M * N), *stock_backward], kept + 2 * M * N, 0
    norm = product(N, K, r)
    if M <= FEW:
        path = "few tokens: one pass over W"
        flops, moved = base[0] + h[0] + lora[0], base[1] + r * K + N * r + M * r
        forward = [(flops + norm[0], moved)] if fused_norm else [norm, (flops, moved)]
    else:
        path = "x A^T, then the product"
        forward = [norm, h, (base[0] + lora[0], base[1] + M * r + N * r)]
    scaled = 2 * M * N + min(M * N, 2 * N * K)
    scale = [(dB[0], scaled + M * r + N * r)] if r <= FUSE_DB else [(0, scaled), dB]
    return path, forward, [*scale, dh, dA, (base[0] + h[0], base[1] + M * r + r * K)], kept, M * N


def predict(M: int, N: int, K: int, r: int, *, gpu: str = "h200", method: Method = "fdora", itemsize: int = 2) -> Prediction:
    """The least time by the formulas at the head of this file, the norm with those of forward.

    Raises:
      FdoraError: a size is less than 1, or the GPU or the method is unknown.
    """
    if gpu not in GPUS:
        raise fail("predict", "gpu", f"one of {', '.join(GPUS)}", repr(gpu), "Others can be added to fdora/rates.py.")
    for arg, size in {"M": M, "N": N, "K": K, "r": r}.items():
        if size < 1:
            raise fail("predict", arg, "at least 1", size, "It is a number of tokens, features or ranks.")
    if method not in get_args(Method):
        raise fail("predict", "method", "'fdora', 'lora' or 'peft_dora'", repr(method), "Compare these.")
    rate = GPUS[gpu]
    path, forward, backward, kept, output = operations(M, N, K, r, method, r <= INSIDE and 90 <= rate.capability < 100)
    seconds = [sum(rate.seconds(f, 0, n * itemsize) for f, n in ops) for ops in (forward, backward)]
    return Prediction(path, seconds[0], seconds[1], kept * itemsize, output * itemsize)
