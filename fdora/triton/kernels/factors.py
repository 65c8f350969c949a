"""Gradients of both factors in one launch; see fdora/triton/factors.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.tile import Matrix, block_on, loaded, store
from fdora.triton.runtime.cost import launched


@triton.jit
def _over_tokens(
    wide, narrow, out, m, norm, first, M, C, R,
    BY_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """sum_t wide_tc narrow_tr for the columns c that begin at ``first``, times their g."""
    c, r = first + tl.arange(0, BLOCK_C), block_on(1, BLOCK_R)
    acc = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    for t0 in range(0, M, BLOCK_M):
        t = t0 + tl.arange(0, BLOCK_M)
        acc = tl.dot(tl.trans(loaded(wide, t, c, M, C)), loaded(narrow, t, r, M, R), acc)
    if BY_G:
        acc *= g_tile(m, norm, c, C)[:, None]
    store(acc, out, c, r, C, R)


@triton.jit(launch_metadata=launched)
def factors_kernel(
    x, dh, dA, dz, h, dB, m, c, M, K, N, R, stride_x, stride_dh, stride_dz, stride_h,
    BY_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """BY_G: dz is dy, and dB takes g."""
    tile, tiles_x = tl.program_id(0), tl.cdiv(K, BLOCK_C)
    if tile < tiles_x:
        _over_tokens(
            Matrix(x, stride_x, None), Matrix(dh, stride_dh, None), Matrix(dA, 1, K), None, None, tile * BLOCK_C, M, K, R,
            False, BLOCK_C, BLOCK_R, BLOCK_M,
        )
    else:
        _over_tokens(
            Matrix(dz, stride_dz, None), Matrix(h, stride_h, None), Matrix(dB, R, None), m, c, (tile - tiles_x) * BLOCK_C,
            M, N, R, BY_G, BLOCK_C, BLOCK_R, BLOCK_M,
        )
