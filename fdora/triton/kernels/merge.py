"""``W' = g (W + s B A)`` and its inverse, tile by tile; see fdora/triton/merge.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import EPS, g_tile
from fdora.triton.kernels.norm import walk
from fdora.triton.kernels.tile import Blocks, LowRank, Matrix, store, tile_of, unscaled, vector
from fdora.triton.runtime.cost import kernel


@triton.jit
def _merge_tile(i, W, low, m, c, out, s, N, K, HOW: tl.constexpr):
    UNDO: tl.constexpr = HOW[0]
    T: tl.constexpr = HOW[1]
    first_n, first_k, n, k, w, acc = tile_of(i, W, low, N, K, T)
    acc = unscaled(acc, low, n, k, N, K)
    g = g_tile(m, c, n, N)[:, None]
    if UNDO:  # a row with c = 0 was -s B A itself
        cn = vector(c, n, N, 1.0).to(tl.float32)
        w = tl.where((cn <= EPS)[:, None], 0.0, w / g)
    v = w - s * acc if UNDO else g * (w + s * acc)
    if T.TMA:
        out.store([first_n, first_k], v.to(out.dtype))
    else:
        store(v, Matrix(out, K, None), n, k, N, K)


@kernel("W A B out", "N K R A")
def merge_kernel(
    W, A, B,  # (N, K), (R, K), (N, R), or their descriptors
    scale_n, scale_k, m, c,  # (N,), (K,), (N,), (N,)
    out,  # (N, K)
    s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    UNDO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):
    low = LowRank(Matrix(A, stride_ar, stride_ak), Matrix(B, stride_bn, stride_br), R, scale_k, scale_n)
    T: tl.constexpr = Blocks(BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA)
    of = (Matrix(W, stride_wn, stride_wk), low, m, c, out, s, N, K)
    walk(_merge_tile, of, (UNDO, T), tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K), None, None, 0, TMA, False)
