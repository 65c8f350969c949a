"""What kernels begin a tile with: W beside B A for the norm and the merge."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_at(columns, FLAT: tl.constexpr):
    """Where a program is on the first axis of a grid so wide. FLAT: both axes lie on it, row by row, as CUDA starts two."""
    column = tl.program_id(0)
    if FLAT:
        column = column % columns
    return column


@triton.jit
def row_at(columns, FLAT: tl.constexpr):
    """The same on the second axis."""
    return tl.program_id(0) // columns if FLAT else tl.program_id(1)


@triton.jit
def tile_at(i, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of the i-th tile."""
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    group = i // (GROUP * tiles_k)
    height = min(tiles_n - group * GROUP, GROUP)
    return group * GROUP + (i % (GROUP * tiles_k)) % height, (i % (GROUP * tiles_k)) // height


@triton.jit
def low_rank(
    A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_R: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
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
def low_rank_tma(A, B, first_n, first_k, R, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):
    """The same from tensor descriptors."""
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for r0 in range(0, R, BLOCK_R):
        acc = tl.dot(B.load([first_n, r0]), A.load([r0, first_k]), acc)
    return acc


@triton.jit
def slab_of_B(B, n, N, R, stride_bn, stride_br, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    """Rows n of a B no wider than a slab."""
    r = tl.arange(0, BLOCK_R)
    at = B + n[:, None].to(tl.int64) * stride_bn + r[None, :].to(tl.int64) * stride_br
    return tl.load(at) if EVEN else tl.load(at, mask=(n < N)[:, None] & (r < R)[None, :], other=0.0)


@triton.jit
def slab_of_A(A, k, K, R, stride_ar, stride_ak, BLOCK_R: tl.constexpr, EVEN: tl.constexpr):
    """Columns k of an A no higher than a slab."""
    r = tl.arange(0, BLOCK_R)
    at = A + r[:, None].to(tl.int64) * stride_ar + k[None, :].to(tl.int64) * stride_ak
    return tl.load(at) if EVEN else tl.load(at, mask=(r < R)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _weight_and_product(
    W, A, B, n, k, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_R: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """W and B A at rows n and columns k in float32; zeros outside."""
    at_w = W + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
    # EVEN: 1, every tile is whole; 2, every slab too. Masks would keep the loads from being pipelined at full width.
    w = tl.load(at_w) if EVEN else tl.load(at_w, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    acc = low_rank(A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN == 2, PRECISION)
    return w.to(tl.float32), acc


@triton.jit
def _weight_and_product_tma(W, A, B, first_n, first_k, R, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):
    """The same from tensor descriptors: the copy engine fetches the tiles and fills with zeros outside."""
    acc = low_rank_tma(A, B, first_n, first_k, R, BLOCK_N, BLOCK_K, BLOCK_R)
    return W.load([first_n, first_k]).to(tl.float32), acc


@triton.jit
def tile_of(
    i, W, A, B, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):
    """Row and column of the i-th tile, the rows n and columns k in it, and W and B A there in float32."""
    tile_n, tile_k = tile_at(i, N, K, BLOCK_N, BLOCK_K, GROUP)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    if TMA:
        w, acc = _weight_and_product_tma(W, A, B, tile_n * BLOCK_N, tile_k * BLOCK_K, R, BLOCK_N, BLOCK_K, BLOCK_R)
    else:
        w, acc = _weight_and_product(
            W, A, B, n, k, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION
        )
    return tile_n, tile_k, n, k, w, acc


@triton.jit
def unscaled(acc, scale_n, scale_k, n, k, N, K):
    """The product of factors that split_kernel scaled."""
    by_k = tl.load(scale_k + k, mask=k < K, other=0.0)
    return acc * by_k[None, :] * tl.load(scale_n + n, mask=n < N, other=0.0)[:, None]
