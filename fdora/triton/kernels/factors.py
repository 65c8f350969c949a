"""Gradients of both factors in one launch; see fdora/triton/factors.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.product import over_tokens
from fdora.triton.kernels.tile import Matrix, block_on, store
from fdora.triton.runtime.cost import launched


@triton.jit
def _factor(
    wide, narrow, out, m, norm, first, M, C, R, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr
):
    """sum_t wide_tc narrow_tr for the columns c that begin at ``first``; times their g, where m is there."""
    c, r = first + tl.arange(0, BLOCK_C), block_on(1, BLOCK_R)
    acc = over_tokens(wide, narrow, c, r, 0, M, C, R, BLOCK_M)
    if m is not None:
        acc *= g_tile(m, norm, c, C)[:, None]
    store(acc, out, c, r, C, R)


@triton.jit(launch_metadata=launched)
def factors_kernel(
    x, dh, dA, dz, h, dB, m, c, M, K, N, R, stride_x, stride_dh, stride_dz, stride_h,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Where m is there, dz is dy, and dB takes g."""
    tile, tiles_x = tl.program_id(0), tl.cdiv(K, BLOCK_C)
    x, dh = Matrix(x, stride_x, None), Matrix(dh, stride_dh, None)
    dz, h = Matrix(dz, stride_dz, None), Matrix(h, stride_h, None)
    if tile < tiles_x:
        _factor(x, dh, Matrix(dA, 1, K), None, None, tile * BLOCK_C, M, K, R, BLOCK_C, BLOCK_R, BLOCK_M)
    else:
        _factor(dz, h, Matrix(dB, R, 1), m, c, (tile - tiles_x) * BLOCK_C, M, N, R, BLOCK_C, BLOCK_R, BLOCK_M)
