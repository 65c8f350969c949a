"""Gradients of both factors in one launch; see fdora/triton/factors.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.runtime.cost import launched


@triton.jit
def _over_tokens(
    wide, narrow, out, m, norm, first, M, C, R, stride_wide, stride_narrow, stride_c, stride_r,
    BY_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """sum_t wide_tc narrow_tr for the columns c that begin at ``first``, times their g."""
    c, r = first + tl.arange(0, BLOCK_C), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_c, in_r = c < C, r < R
    acc = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    for t0 in range(0, M, BLOCK_M):
        t = t0 + tl.arange(0, BLOCK_M)
        row, mask = t[:, None].to(tl.int64), (t < M)[:, None]
        u = tl.load(wide + row * stride_wide + c[None, :], mask=mask & in_c[None, :], other=0.0)
        v = tl.load(narrow + row * stride_narrow + r[None, :], mask=mask & in_r[None, :], other=0.0)
        acc = tl.dot(tl.trans(u), v, acc)
    if BY_G:
        acc *= g_tile(m, norm, c, C)[:, None]
    at = out + c[:, None].to(tl.int64) * stride_c + r[None, :].to(tl.int64) * stride_r
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_c[:, None] & in_r[None, :])


@triton.jit(launch_metadata=launched)
def factors_kernel(
    x, dh, dA, dz, h, dB, m, c, M, K, N, R, stride_x, stride_dh, stride_dz, stride_h,
    BY_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """BY_G: dz is dy, and dB takes g."""
    tile, tiles_x = tl.program_id(0), tl.cdiv(K, BLOCK_C)
    if tile < tiles_x:
        _over_tokens(
            x, dh, dA, None, None, tile * BLOCK_C, M, K, R, stride_x, stride_dh, 1, K, False, BLOCK_C, BLOCK_R, BLOCK_M
        )
    else:
        first = (tile - tiles_x) * BLOCK_C
        _over_tokens(dz, h, dB, m, c, first, M, N, R, stride_dz, stride_h, R, 1, BY_G, BLOCK_C, BLOCK_R, BLOCK_M)
