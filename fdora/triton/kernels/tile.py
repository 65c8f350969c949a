"""What kernels begin a tile with: W beside B A for the norm and the merge.

Entry kernels have flat lists of parameters. Inside, operands and constants are the named tuples below.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Matrix(NamedTuple):
    """A pointer, and the strides of rows and columns, None where columns are adjacent; or a tensor descriptor, and None."""

    p: Any
    row: Any
    col: Any


class LowRank(NamedTuple):
    """B A with A (R, K) and B (N, R). Where split_kernel scaled them: by how much, (K,) and (N,)."""

    A: Any
    B: Any
    R: Any
    scale_k: Any
    scale_n: Any


class Blocks(NamedTuple):
    """Constants of a tile (N, K) of W and a slab R of the rank. ``GROUP``: see tile_at. ``EVEN``: 1, every tile is whole; 2,
    every slab too. Masks would keep the loads from being pipelined at full width. ``TMA``: operands are descriptors."""

    N: Any
    K: Any
    R: Any
    GROUP: Any
    EVEN: Any
    PRECISION: Any
    TMA: Any


@triton.jit
def block_on(AXIS: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers that a program has on an axis of the grid."""
    return tl.program_id(AXIS) * BLOCK + tl.arange(0, BLOCK)


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
def strip_at(N, BLOCK_N: tl.constexpr, FLAT: tl.constexpr):
    """Of such a grid the columns that a program has, and its row."""
    columns = tl.cdiv(N, BLOCK_N)
    return column_at(columns, FLAT) * BLOCK_N + tl.arange(0, BLOCK_N), row_at(columns, FLAT)


@triton.jit
def tile_at(i, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of the i-th tile: row by row, or of GROUP rows of tiles column by column."""
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    if GROUP:
        group = i // (GROUP * tiles_k)
        height = min(tiles_n - group * GROUP, GROUP)
        return group * GROUP + (i % (GROUP * tiles_k)) % height, (i % (GROUP * tiles_k)) // height
    else:
        return i // tiles_k, i % tiles_k


@triton.jit
def addresses(t, i, j):
    """Where the elements of a Matrix at rows i and columns j lie."""
    return t.p + i[:, None].to(tl.int64) * t.row + (j[None, :] if t.col is None else j[None, :].to(tl.int64) * t.col)


@triton.jit
def both(rows, columns):
    """Which elements of a tile there are, of its rows and its columns."""
    return rows[:, None] & columns[None, :]


@triton.jit
def within(i, j, I, J):
    """Which rows i and columns j there are in a matrix (I, J)."""
    return both(i < I, j < J)


@triton.jit
def vector(p, i, I, other=0.0):
    """The numbers i of (I,); ``other`` outside."""
    return tl.load(p + i, mask=i < I, other=other)


@triton.jit
def put(v, p, i, I):
    """v as the numbers i of (I,), in their dtype."""
    tl.store(p + i, v.to(p.dtype.element_ty), mask=i < I)


@triton.jit
def zeros(I: tl.constexpr, J: tl.constexpr = None):
    """Sums, (I,) or (I, J), which are in float32 whatever is added up."""
    if J is None:
        return tl.zeros((I,), tl.float32)
    else:
        return tl.zeros((I, J), tl.float32)


@triton.jit
def loaded(t, i, j, I, J, EVEN: tl.constexpr = 0):
    """The elements of a Matrix (I, J) at rows i and columns j; zeros outside."""
    return tl.load(addresses(t, i, j)) if EVEN else tl.load(addresses(t, i, j), mask=within(i, j, I, J), other=0.0)


@triton.jit
def store(v, t, i, j, I, J):
    """v into a Matrix (I, J) at rows i and columns j, in its dtype."""
    tl.store(addresses(t, i, j), v.to(t.p.dtype.element_ty), mask=within(i, j, I, J))


@triton.jit
def halves(t):
    """The first and the second half of the columns."""
    return tl.split(tl.permute(tl.reshape(t, (t.shape[0], 2, t.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def low_rank(low, n, k, N, K, T: tl.constexpr):
    """B A at rows n and columns k in float32; zeros outside."""
    A, B, R, _, _ = low
    r = tl.arange(0, T.R)
    in_n, in_k = n < N, k < K
    at_b, at_a = addresses(B, n, r), addresses(A, r, k)
    acc = zeros(n.shape[0], k.shape[0])
    for r0 in range(0, R, T.R):
        if T.EVEN == 2:
            b, a = tl.load(at_b), tl.load(at_a)
        else:
            b = tl.load(at_b, mask=in_n[:, None] & (r[None, :] < R - r0), other=0.0)
            a = tl.load(at_a, mask=in_k[None, :] & (r[:, None] < R - r0), other=0.0)
        acc = tl.dot(b, a, acc, input_precision=T.PRECISION)
        at_b += T.R * B.col
        at_a += T.R * A.row
    return acc


@triton.jit
def low_rank_tma(low, first_n, first_k, T: tl.constexpr):
    """The same from tensor descriptors: the copy engine fetches the tiles and fills with zeros outside."""
    acc = zeros(T.N, T.K)
    for r0 in range(0, low.R, T.R):
        acc = tl.dot(low.B.p.load([first_n, r0]), low.A.p.load([r0, first_k]), acc)
    return acc


@triton.jit
def tile_of(i, W, low, N, K, T: tl.constexpr):
    """Where the i-th tile begins, the rows n and columns k in it, and W and B A there in float32."""
    tile_n, tile_k = tile_at(i, N, K, T.N, T.K, T.GROUP)
    first_n, first_k = tile_n * T.N, tile_k * T.K
    n, k = first_n + tl.arange(0, T.N), first_k + tl.arange(0, T.K)
    if T.TMA:
        acc = low_rank_tma(low, first_n, first_k, T)
        w = W.p.load([first_n, first_k])
    else:
        w = loaded(W, n, k, N, K, T.EVEN)
        acc = low_rank(low, n, k, N, K, T)
    return first_n, first_k, n, k, w.to(tl.float32), acc


@triton.jit
def unscaled(acc, low, n, k, N, K):
    """The product of factors, whether split_kernel scaled them or not."""
    if low.scale_n is not None:
        by_k = vector(low.scale_k, k, K)
        acc = acc * by_k[None, :] * vector(low.scale_n, n, N)[:, None]
    return acc
