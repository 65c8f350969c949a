"""A dense W out of its codes, tile by tile; see fdora/triton/dequantize.py.

A thread reads as many codes next to each other as make the 16 bytes that it writes, so the weights leave from the registers
in which they were decoded: a wider read would send all of them through shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fdora.triton.kernels.decode import (
    Codes,
    byte_scales,
    byte_weights,
    group_scale,
    int_weights,
    pair_codes,
    pair_groups,
    pair_weights,
    single_weights,
    tile_bytes,
    tile_scales,
    tile_words,
)
from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.multi import bounds_of
from fdora.triton.kernels.scale import dot_rows, over_few, store_gradients
from fdora.triton.kernels.tile import Matrix, addresses, both
from fdora.triton.runtime.cost import decoded, kernel


class Blocks(NamedTuple):
    """Constants of a tile of W. ``VECTOR``: codes that a thread reads at once. ``EVEN``: every tile is whole."""

    N: Any
    K: Any
    VECTOR: Any
    EVEN: Any


@triton.jit
def _rows(i, N, BLOCK_N: tl.constexpr):
    n = i.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return n, n < N


@triton.jit
def decode4(W, n, in_n, first_k, K, last, HOW: tl.constexpr, T: tl.constexpr):
    """W at rows n and a tile's columns, which end at ``last``."""
    if HOW.PAIRS:
        GROUPS: tl.constexpr = T.K // HOW.GROUP if T.K > HOW.GROUP else 1
        PART: tl.constexpr = T.K // 2 // GROUPS
        x = pair_codes(W.codes, n, first_k, in_n, K, T.K, T.VECTOR, T.EVEN)
        at, there = pair_groups(W, n, first_k, in_n, HOW, T.K)
        scale = group_scale(W, at, there, HOW)
        even, odd = pair_weights(tl.reshape(x, (T.N, GROUPS, PART)), scale, HOW)
        return tl.reshape(tl.join(even, odd), (T.N, T.K))
    else:
        return single_weights(W, n, first_k + tl.arange(0, T.K), in_n, K, HOW)


@triton.jit
def decode8(W, n, in_n, first_k, K, last, HOW: tl.constexpr, T: tl.constexpr):
    k = first_k + tl.arange(0, T.K)
    inside = both(in_n, k < last)
    if HOW.SCALES == "group":
        scale, zero = tile_scales(W, n, in_n, first_k, K, HOW, T)
        x = tile_bytes(W, tile_words(W, n, in_n, first_k, K, HOW, T, T.VECTOR), n, HOW, T)
        return int_weights(W, x, scale, zero, HOW)
    else:
        at = tl.max_contiguous(addresses(Matrix(W.codes, W.row, W.col), n, k), (1, T.VECTOR))
        x = tl.load(at) if T.EVEN else tl.load(at, mask=inside, other=0)
        return byte_weights(x, byte_scales(W, n, k, first_k, in_n, inside, HOW, T.K), HOW)


@kernel("out", rest=decoded)
def dequantize_kernel(
    codes, scales, code256, scales2, offset,  # see decode.py
    m, c,  # (N,), or None
    out,  # (N, last - first), in rows of ``pitch``
    N, K, groups, first, last, pitch, stride_cn, stride_ck,
    HOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Columns from ``first`` to ``last``, a program for each tile, row by row."""
    T: tl.constexpr = Blocks(BLOCK_N, BLOCK_K, VECTOR, EVEN)
    DECODE: tl.constexpr = decode4 if HOW.BITS == 4 else decode8
    W = Codes(codes, scales, code256, scales2, offset, groups, stride_cn, stride_ck)
    tiles = tl.cdiv(last - first, BLOCK_K)
    i = tl.program_id(0) // tiles
    if PAIRED:  # what shares bytes, one after the other: they come out of memory once
        i = i // 2 + i % 2 * (N // 2 // BLOCK_N)
    n, in_n = _rows(i, N, BLOCK_N)
    first_k = first + (tl.program_id(0) % tiles) * BLOCK_K
    w, k = DECODE(W, n, in_n, first_k, K, last, HOW, T), first_k + tl.arange(0, BLOCK_K)
    if m is not None:
        w *= g_tile(m, c, n, N)[:, None]
    w, at = w.to(out.dtype.element_ty), out + n[:, None] * pitch + (k - first)[None, :]
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=both(in_n, k < last))


@kernel("m c")
def lost_kernel(
    codes, scales, code256, scales2, offset,  # see decode.py
    dy, x, h, b,  # (M, N), (M, K), (M, R) of sorted tokens, (G, N, R)
    offsets, m, c, dm, dc,  # (G,) or None, (G, N)
    M, G, N, K, R, groups, apart, tiny,
    stride_dy, stride_xm, stride_xk, stride_hm, stride_hr, stride_ba, stride_bn, stride_br, stride_cn, stride_ck,
    HOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
    """The gradients of m and c of rows whose g is nothing or nearly so, from the products: dg_n = W_n (dy^T x)_n +
    B_n (dy^T h)_n. A program for each BLOCK_N rows of each adapter, which ends at once where there is no such row. W of an
    adapter begins ``apart`` rows behind that of the one before."""
    T: tl.constexpr = Blocks(BLOCK_N, BLOCK_K, VECTOR, EVEN)
    DECODE: tl.constexpr = decode4 if HOW.BITS == 4 else decode8
    W = Codes(codes, scales, code256, scales2, offset, groups, stride_cn, stride_ck)
    a = tl.program_id(1)
    lo, hi = bounds_of(offsets, a, G, M)
    of_a, first = tl.cast(a, tl.int64), tl.cast(lo, tl.int64)
    dy, x = Matrix(dy + first * stride_dy, stride_dy, None), Matrix(x + first * stride_xm, stride_xm, stride_xk)
    n, in_n = _rows(tl.program_id(0), N, BLOCK_N)
    m, c = m + of_a * N, c + of_a * N
    g = g_tile(m, c, n, N)
    lost = (tl.abs(g) < tiny) & in_n
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        own_h = Matrix(h + first * stride_hm, stride_hm, stride_hr)
        dg = dot_rows(dy, own_h, Matrix(b + of_a * stride_ba, stride_bn, stride_br), n, N, hi - lo, R)
        for first_k in range(0, K, BLOCK_K):
            w, k = DECODE(W, n + of_a * apart, in_n, first_k, K, K, HOW, T), first_k + tl.arange(0, BLOCK_K)
            dg += tl.sum(over_few(dy, x, n, k, N, hi - lo, K) * w, axis=1)
        store_gradients(dg, g, tl.load(c + n, mask=in_n, other=1.0), dm, dc, of_a * N + n, lost)
