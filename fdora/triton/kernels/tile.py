"""One tile of W beside the same tile of B A: what the norm and the merge both start from."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(i, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of the i-th tile."""
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    group = i // (GROUP * tiles_k)
    height = min(tiles_n - group * GROUP, GROUP)
    return group * GROUP + (i % (GROUP * tiles_k)) % height, (i % (GROUP * tiles_k)) // height


@triton.jit
def product(
    A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_R: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B A at rows n and columns k in float32; zeros outside."""
    r = tl.arange(0, BLOCK_R)
    in_n, in_k = n < N, k < K
    at_b = B + n[:, None].to(tl.int64) * stride_bn + r[None, :].to(tl.int64) * stride_br
    at_a = A + r[:, None].to(tl.int64) * stride_ar + k[None, :].to(tl.int64) * stride_ak
    acc = tl.zeros((n.shape[0], k.shape[0]), tl.float32)
    for r0 in range(0, R, BLOCK_R):
        if EVEN:
            b, a = tl.load(at_b), tl.load(at_a)
        else:
            b = tl.load(at_b, mask=in_n[:, None] & (r[None, :] < R - r0), other=0.0)
            a = tl.load(at_a, mask=in_k[None, :] & (r[:, None] < R - r0), other=0.0)
        acc = tl.dot(b, a, acc, input_precision=PRECISION)
        at_b += BLOCK_R * stride_br
        at_a += BLOCK_R * stride_ar
    return acc


@triton.jit
def weight_and_product(
    W, A, B, n, k, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_R: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W and B A at rows n and columns k in float32; zeros outside."""
    at_w = W + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
    # EVEN: every tile and slab is whole. Masks would keep the loads from being pipelined at full width.
    w = tl.load(at_w) if EVEN else tl.load(at_w, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    acc = product(A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION)
    return w.to(tl.float32), acc


@triton.jit
def weight_and_product_tma(W, A, B, first_n, first_k, R, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):
    """The same from tensor descriptors: the copy engine fetches the tiles and fills with zeros outside."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for r0 in range(0, R, BLOCK_R):
        acc = tl.dot(B.load([first_n, r0]), A.load([r0, first_k]), acc)
    return W.load([first_n, first_k]).to(tl.float32), acc


@triton.jit
def unscaled(acc, scale_n, scale_k, n, k, N, K):
    """The product of factors that split_kernel scaled."""
    by_k = tl.load(scale_k + k, mask=k < K, other=0.0)
    return acc * by_k[None, :] * tl.load(scale_n + n, mask=n < N, other=0.0)[:, None]
