"""The row norm of W + s B A, tile by tile, of a W that is dense or codes; see fdora/triton/norm.py and quant.py.

One body sums the squares of a run of tiles. It is told how W is read (READ) and what becomes of a tile beside its B A (TILE):
jit functions, whose constants travel in a tuple of their own (HOW).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.sums import column_sums
from fdora.triton.kernels.tile import (
    Blocks,
    LowRank,
    Matrix,
    addresses,
    block_on,
    both,
    halves,
    loaded,
    low_rank,
    low_rank_tma,
    put,
    tile_at,
    unscaled,
    vector,
    zeros,
)
from fdora.triton.runtime.cost import kernel, norms
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


class Rows(NamedTuple):
    """Of a tile: where it begins, its rows as B and the partials have them, as W has them, and which there are."""

    first: Any
    n: Any
    of_W: Any
    inside: Any


class Sums(NamedTuple):
    """Where results go: the partial sums (runs, N), and W (N, K) itself in rows of this pitch, where it is wanted."""

    partial: Any
    dense: Any
    pitch: Any


class Run(NamedTuple):
    """Constants of a run of tiles. ``SINGLE``: it is one tile. ``ONE_SLAB``: B is read once. ``AHEAD``: W is read a tile
    ahead. ``STAGES``: of the loop, where W is to be copied ahead though it enters no product. ``UNIT``: columns that it counts
    as one; a tile of codes, whose divisions by what lies in a byte or a group fold then. ``CUT``: the last run may be
    shorter."""

    SINGLE: Any
    ONE_SLAB: Any
    AHEAD: Any
    STAGES: Any
    UNIT: Any
    CUT: Any


@triton.jit
def walk(
    EACH: tl.constexpr, of, HOW: tl.constexpr, count, old_hash, new_hash,
    WORDS: tl.constexpr, FLATTEN: tl.constexpr, PDL: tl.constexpr,
):
    """``EACH`` of ``count`` things: a program each, or few programs that share them. Where there are fingerprints, of WORDS,
    there is nothing to do if both are the same."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if old_hash is not None or FLATTEN:
        if old_hash is not None:
            count = tl.where(unchanged(old_hash, new_hash, WORDS), 0, count)
        # Flattened, the copies of the next tile start under the last products and the squares of this one.
        for i in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=FLATTEN):
            EACH(i, *of, HOW)
    else:
        EACH(tl.program_id(0), *of, HOW)


@triton.jit
def product_of(low, b, rows, first_k, N, K, T: tl.constexpr):
    """B A of a tile. ``b``: the only slab of B, if it is one."""
    k = first_k + tl.arange(0, T.K)
    if T.TMA:
        acc = low_rank_tma(low, rows.first, first_k, T)
    elif b is not None:
        a = loaded(low.A, tl.arange(0, T.R), k, low.R, K, T.EVEN == 2)
        acc = unscaled(tl.dot(b, a, input_precision=T.PRECISION), low, rows.n, k, N, K)
    else:
        acc = unscaled(low_rank(low, rows.n, k, N, K, T), low, rows.n, k, N, K)
    return acc


@triton.jit
def squares_of_run(
    i, W, low, s, to, first, N, K, span, OF: tl.constexpr
):
    """The i-th run of tiles of the same rows: the sums of squares of ``span`` columns of N rows of W, from ``first`` on.
    OF: the reader of W, what becomes of a tile, HOW codes lie, Blocks and Run."""
    READ: tl.constexpr = OF[0]  # Triton before 3.9 takes no constants apart by a star
    TILE: tl.constexpr = OF[1]
    HOW: tl.constexpr = OF[2]
    T: tl.constexpr = OF[3]
    RUN: tl.constexpr = OF[4]
    tile_n, run = tile_at(i, N, K, T.N, span, T.GROUP)
    n = tile_n * T.N + tl.arange(0, T.N)
    rows = Rows(tile_n * T.N, n, (first + n).to(tl.int64), n < N)
    b = None
    if RUN.ONE_SLAB and not T.TMA:
        b = loaded(low.B, n, tl.arange(0, T.R), N, low.R, T.EVEN == 2)
    if RUN.SINGLE:
        k0 = run * T.K
        w = READ(W, None, rows, k0, k0, K, HOW, T)
        squares = TILE(W, w, low, b, s, to, rows, k0, N, K, HOW, T)
    else:
        squares = zeros(T.N)
        begin = run * (span // RUN.UNIT)
        end = begin + span // RUN.UNIT
        if RUN.CUT:
            end = min(end, tl.cdiv(K, RUN.UNIT))
        if RUN.AHEAD:
            w = READ(W, None, rows, begin * T.K, min(begin + 1, end - 1) * T.K, K, HOW, T)
        for i in tl.range(begin, end, T.K // RUN.UNIT, num_stages=RUN.STAGES):
            k0 = i * RUN.UNIT
            if RUN.AHEAD:
                w_next = READ(W, w, rows, min(i + 1, end - 1) * T.K, min(i + 2, end - 1) * T.K, K, HOW, T)
            else:
                w = READ(W, None, rows, k0, k0, K, HOW, T)
            squares += TILE(W, w, low, b, s, to, rows, k0, N, K, HOW, T)
            if RUN.AHEAD:
                w = w_next
    tl.store(to.partial + run.to(tl.int64) * N + n, squares, mask=rows.inside)


@triton.jit
def read_dense(W, before, rows, first_k, then, K, HOW: tl.constexpr, T: tl.constexpr):
    if T.TMA:
        w = 0.0  # TILE reads it, behind the products
    else:
        k = first_k + tl.arange(0, T.K)
        at = addresses(W, rows.of_W, k)
        w = tl.load(at) if T.EVEN else tl.load(at, mask=both(rows.inside, k < K), other=0.0)
    return w


@triton.jit
def dense_tile(W, w, low, b, s, to, rows, first_k, N, K, HOW: tl.constexpr, T: tl.constexpr):
    if b is None and not T.TMA:
        w = w.to(tl.float32)  # behind the product, rows of no 16 bytes would spill more
    acc = product_of(low, b, rows, first_k, N, K, T)
    if T.TMA:
        w = W.p.load([rows.first, first_k])
    w = w.to(tl.float32)
    if T.TMA and low.scale_n is not None:  # a half of the columns at a time: the scales of 256 would spill
        low_acc, high_acc = halves(acc)
        w_low, w_high = halves(w)
        k = first_k + tl.arange(0, T.K // 2)
        v = w_low + s * unscaled(low_acc, low, rows.n, k, N, K)
        squares = tl.sum(v * v, axis=1)
        v = w_high + s * unscaled(high_acc, low, rows.n, k + T.K // 2, N, K)
        squares += tl.sum(v * v, axis=1)
    else:
        v = w + s * acc
        squares = tl.sum(v * v, axis=1)
    return squares


@kernel("W A B partial", rest=norms)
def norm_kernel(
    W, A, B,  # (N, K), (R, K), (N, R), or their descriptors; or those of experts, or of adapters of one W
    scale_n, scale_k,  # (N,), (K,)
    partial,  # (tiles or strips along K, N), or as many of these
    old_hash, new_hash,  # (WORDS,)
    ranks,  # of the adapters of experts, or None: R
    s, N, K, R, span,  # columns of a strip, or None: single tiles
    stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    next_w, next_a, next_b,  # from one expert or adapter to the next, each with its s; None: there is one
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):
    SINGLE: tl.constexpr = span is None
    columns = BLOCK_K if SINGLE else span
    if next_w is not None:
        e = tl.program_id(1).to(tl.int64)
        W, A, B, s = W + e * next_w, A + e * next_a, B + e * next_b, tl.load(s + e)
        partial += e * tl.cdiv(K, columns) * N
        if ranks is not None:
            R = tl.load(ranks + e)
    low = LowRank(Matrix(A, stride_ar, stride_ak), Matrix(B, stride_bn, stride_br), R, scale_k, scale_n)
    T: tl.constexpr = Blocks(BLOCK_N, BLOCK_K, BLOCK_R, GROUP if SINGLE else 0, EVEN, PRECISION, TMA)
    of = (Matrix(W, stride_wn, stride_wk), low, s, Sums(partial, None, None), 0, N, K, columns)
    HOW: tl.constexpr = (read_dense, dense_tile, None, T, Run(SINGLE, not SINGLE, False, AHEAD, 1, True))
    count = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, columns)
    walk(squares_of_run, of, HOW, count, old_hash, new_hash, WORDS, TMA, PDL)


@kernel("partial c out")
def choose_kernel(
    partial,  # (strips, N)
    c,  # (N,): the norm of before
    old_hash, new_hash,  # (WORDS,)
    out,  # (N,)
    N, strips,
    KEEP: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):
    """The root of the column sums, added as in sum_kernel; or c as it was. KEEP writes it over c, too."""
    if PDL:
        gdc_wait()
    same = unchanged(old_hash, new_hash, WORDS)
    n = block_on(0, BLOCK_N)
    acc = column_sums(partial, n, N, N, 0 if same else strips, BLOCK_T)
    before = vector(c, n, N)
    after = tl.where(same, before, tl.sqrt_rn(acc))
    put(after, out, n, N)
    if KEEP:
        put(after, c, n, N)
