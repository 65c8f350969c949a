"""The layer for a handful of tokens with its norm; see fdora/triton/small_norm.py."""

from __future__ import annotations

import triton.language as tl

from fdora.triton.kernels.product import finish
from fdora.triton.kernels.small import low_rank_term, slab
from fdora.triton.kernels.tile import Matrix, addresses, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_wait


@kernel("x w a part h b out pre_scale", "M N K x, M N R x, K N R x")
def small_norm_kernel(
    x, w, a, part, h, b, out, pre_scale, m, c, bias, s, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_ar, stride_ak, stride_br, stride_bn, stride_hm,
    PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """One slab holds all of the rank."""
    col = tl.program_id(0) * BLOCK_N
    t, n, r, k = tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    A, B, W = Matrix(a, stride_ar, stride_ak), Matrix(b, stride_br, stride_bn), Matrix(w, stride_wk, stride_wn)
    bt = slab(B, n, r, N, R)
    at_x, at_w, at_a = addresses(Matrix(x, stride_xm, stride_xk), t, k), addresses(W, k, n), addresses(A, r, k)
    acc = zeros(BLOCK_M, BLOCK_N)
    squares = zeros(BLOCK_K, BLOCK_N)  # summed over rows at the end, where alone the warps meet
    for k0 in range(0, K, BLOCK_K):
        xt = tl.load(at_x, mask=within(t, k, M, K - k0), other=0.0)
        wt = tl.load(at_w, mask=within(k, n, K - k0, N), other=0.0)
        at = tl.load(at_a, mask=within(r, k, R, K - k0), other=0.0)
        acc = tl.dot(xt, wt, acc)
        v = wt.to(tl.float32) + s * tl.dot(tl.trans(at), bt)
        squares += v * v
        at_x += BLOCK_K * stride_xk
        at_w += BLOCK_K * stride_wk
        at_a += BLOCK_K * stride_ak
    if PDL:
        gdc_wait()
    squares = tl.sum(squares, axis=0)
    acc = low_rank_term(
        acc, None, part, Matrix(h, stride_hm, None), B, None, None, s, col, M, N, R, x.dtype.element_ty, PARTS, BLOCK_R,
        1 if PARTS > 2 else 2,
    )
    finish(acc, (out, pre_scale, out if ACCUMULATE else None, m, (c, squares), bias), 0, col, M, N, "normed")
