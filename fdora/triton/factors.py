"""Gradients of both factors in one launch, where tokens are few: dA = dh^T x and dB = dz^T h.

A program has some columns of x, or of dz, and walks down all tokens. Two products of their own start two kernels, and where
cuBLAS splits their long sums four; with few tokens a kernel's start and end are most of its time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fdora.triton.dropout import drawn_inside
from fdora.triton.kernels.scale import factors_kernel
from fdora.triton.runtime import Array, Builder, Device, cdiv, named
from fdora.triton.scale import Given
from fdora.triton.tiles.configs import power_of_two


class FactorsConfig(NamedTuple):
    """Columns and ranks of a program, tokens of a step."""

    BLOCK_C: int
    BLOCK_R: int
    BLOCK_M: int
    num_warps: int
    num_stages: int


def at_once(on: Device, of: Given) -> bool:
    """Whether both are asked for and one launch is faster. us on an H200 (h200/passes.json), beside two products: 192 tokens,
    1280 -> 5120, r = 16 2.5 (5.9); 576, 4096 -> 12288, r = 128 9.5 (11.4); 4705, 1664 -> 12672, r = 64 36 (43). Few columns
    beside many tokens leave multiprocessors idle, where cuBLAS splits the sum; r = 384 takes 23 (18); rows that begin at no 16
    bytes are slow. Where the sum for dA draws dropout's mask it is apart.
    """
    x, dz, r, grads = of.x, of.dy, of.la.A.shape[0], of.grads
    if grads.A is None or grads.B is None or drawn_inside(x, of.la.seed, r):
        return False
    if x.dtype == torch.float32 or on.capability < 80 or r % 8:
        return False
    if (x.stride[1], dz.stride[1]) != (1, 1):
        return False
    few = x.shape[0] <= 640
    return (few and r <= 128) or (r <= 64 and x.shape[1] + dz.shape[1] >= 12288)


def factors_config(r: int) -> FactorsConfig:
    return FactorsConfig(64, power_of_two(r), 64, 4, 4) if r <= 64 else FactorsConfig(128, 64, 64, 4, 3)


def factor_gradients(
    plan: Builder,
    x: Array,
    dh: Array,
    dA: Array,
    dz: Array,
    h: Array,
    dB: Array,
    g: tuple[Array | None, Array | None] = (None, None),
) -> None:
    """(M, K) (M, r) -> dA (r, K), (M, N) (M, r) -> dB (N, r), each in the dtype it has; rows of adjacent columns.

    ``g``: m and c where dz is dy: dB = g dy^T h."""
    (M, K), N, r = x.shape, dz.shape[1], dh.shape[1]
    config = factors_config(r)
    grid = (cdiv(K, config.BLOCK_C) + cdiv(N, config.BLOCK_C), cdiv(r, config.BLOCK_R))
    given = {"x": x, "dh": dh, "dA": dA, "dz": dz, "h": h, "dB": dB, **named("m c", g), "M": M, "K": K, "N": N, "R": r}
    plan.launch(factors_kernel, grid, given, config)
