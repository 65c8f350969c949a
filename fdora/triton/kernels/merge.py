"""``W' = g (W + s B A)`` and its inverse, tile by tile; see fdora/triton/merge.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import EPS, g_tile
from fdora.triton.kernels.tile import tile_of, unscaled
from fdora.triton.runtime.cost import launched


@triton.jit
def _merge_tile(
    i, W, A, B, scale_n, scale_k, m, c, out, s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    UNDO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr,
):
    tile_n, tile_k, n, k, w, acc = tile_of(
        i, W, A, B, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
        BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA,
    )
    if SCALED:
        acc = unscaled(acc, scale_n, scale_k, n, k, N, K)
    g = g_tile(m, c, n, N)[:, None]
    if UNDO:  # a row with c = 0 was -s B A itself
        cn = tl.load(c + n, mask=n < N, other=1.0).to(tl.float32)
        w = tl.where((cn <= EPS)[:, None], 0.0, w / g)
    v = w - s * acc if UNDO else g * (w + s * acc)
    if TMA:
        out.store([tile_n * BLOCK_N, tile_k * BLOCK_K], v.to(out.dtype))
    else:
        at = out + n[:, None].to(tl.int64) * K + k[None, :]
        tl.store(at, v.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit(launch_metadata=launched)
def merge_kernel(
    W, A, B, scale_n, scale_k, m, c, out, s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    UNDO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr,
):
    if TMA:
        # Flattened, the copies of the next tile run under the last products and the stores of this one.
        for i in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K), tl.num_programs(0), flatten=True):
            _merge_tile(
                i, W, A, B, scale_n, scale_k, m, c, out, s, N, K, R,
                stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
                UNDO, BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
            )
    else:
        _merge_tile(
            tl.program_id(0), W, A, B, scale_n, scale_k, m, c, out, s, N, K, R,
            stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
            UNDO, BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
        )
