"""The product of a layer whose tokens belong to many adapters; see fdora/triton/multi_gemm.py.

EXPERTS: each segment has a W of its own. Its tiles begin where it does, and end in it."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.gemm import finish_tma, scaled_codes, slabs
from fdora.triton.kernels.multi import ROUTE, bounds_of, keep_by_segments, place_of, rank_of, scale_of
from fdora.triton.kernels.product import by_segments, finish, products, tile_of_product
from fdora.triton.kernels.tile import Matrix, addresses, both, store, vector, within, zeros
from fdora.triton.runtime.cost import kernel


@triton.jit
def _steps_of(route, tiles, M, N, steps_k, PROGRAMS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """How many steps all tiles of this program have."""
    total = tl.program_id(0) * 0
    for i in range(tl.program_id(0), tiles, PROGRAMS * 32):
        tile = i + tl.arange(0, 32) * PROGRAMS
        row, _ = tile_of_product(tl.minimum(tile, tiles - 1), M, N, BLOCK_M, BLOCK_N, GROUP_M)
        count = tl.load(route + ROUTE * (row // BLOCK_M) + 2, mask=tile < tiles, other=-steps_k)
        total += tl.sum(count + steps_k, axis=0)
    return total


@triton.jit
def _place_of(step, b, tails, SPAN, TRANS_B: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where a step of low rank is: in which part of the bank, its rank and its row; of one that lies apart, what is ahead."""
    right, at, down, skip = b, step % 16384 * BLOCK_K, step // 32768 * SPAN, 0
    if tails is not None:  # noqa: SIM102  it must not be looked at
        if step % 32768 >= 16384:
            right, skip = tails, at
            down = step // 32768 * (SPAN if TRANS_B else BLOCK_K)
    return right, at, down, skip


@triton.jit
def _masked_tiles(
    x, w, h, b, tails, ends, keys, route, steps, tiles, M, N, steps_k, SPAN, PROGRAMS, TRANS_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE_SUBTILE: tl.constexpr, GROUP_M: tl.constexpr,
):
    """The tiles of a program whose sums begin with the masked term of low rank. Two loops for each: with the mask in a loop
    over all steps ptxas let no product run while the next began, which took 1.4 times as long on an H200."""
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS):
        row, col = tile_of_product(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        at_row, acc = row // BLOCK_M, zeros(BLOCK_M, BLOCK_N)
        count, base = tl.load(route + ROUTE * at_row + 2), tl.load(route + ROUTE * at_row + 3)
        for i in range(base, base + count):
            step = tl.load(steps + i)
            right, at, down, skip = _place_of(step, b, tails, SPAN, TRANS_B, BLOCK_K)
            bt = right.load([down + col, at - skip]).T if TRANS_B else right.load([down + at - skip, col])
            acc = tl.dot(h.load([(at_row + step // 32768) * BLOCK_M, at]), bt, acc)
        t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        acc = tl.where(keep_by_segments(keys, t, n, M), acc, 0.0)
        acc = slabs(acc, x, w, row, col, steps_k, TRANS_B, BLOCK_K)
        finish_tma(acc, ends, row, col, M, N, "segments", EPILOGUE_SUBTILE)


@kernel("x w h b out pre_scale residual g", "M N K x, M N R x")
def multi_gemm_tma_kernel(
    x, w, h, b, tails, out, pre_scale, residual, out_at, pre_scale_at, g, bias, ids, keys, route, steps,
    M, N, K, R, SPAN, W_SPAN, BIAS_SPAN, MOST, PROGRAMS, TRANS_B: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE_SUBTILE: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """SPAN, W_SPAN: rows of b and of w from one adapter to the next. ``tails``: as of multi_rows.Laid. MOST: tiles of rows that
    there may be. ``keys``: dropout masks the term of low rank. One loop over the steps of all tiles of a program: the compiler
    joins two only where inner ones are alike."""
    steps_k = tl.cdiv(K, BLOCK_K)
    rows = tl.load(route + ROUTE * MOST) * BLOCK_M if EXPERTS else M
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    if keys is not None:
        ends = (out, pre_scale, residual, g, (ids, 0, 0), bias)
        _masked_tiles(
            x, w, h, b, tails, ends, keys, route, steps, tiles, M, N, steps_k, SPAN, PROGRAMS, TRANS_B,
            BLOCK_M, BLOCK_N, BLOCK_K, EPILOGUE_SUBTILE, GROUP_M,
        )
        return
    total = _steps_of(route, tiles, rows, N, steps_k, PROGRAMS, BLOCK_M, BLOCK_N, GROUP_M)
    tile = tl.program_id(0) - PROGRAMS
    i, end, row, col, at_row, base, own = -1, 0, 0, 0, 0, 0, 0
    acc = zeros(BLOCK_M, BLOCK_N)
    for _ in range(0, total):
        i = tl.where(i == end - 1, 0, i + 1)
        if i == 0:
            tile += PROGRAMS
            row, col = tile_of_product(tile, rows, N, BLOCK_M, BLOCK_N, GROUP_M)
            at_row = row // BLOCK_M
            end = steps_k + tl.load(route + ROUTE * at_row + 2)
            if EXPERTS:
                own, row = tl.load(route + ROUTE * at_row), tl.load(route + ROUTE * at_row + 3)
            else:
                base = tl.load(route + ROUTE * at_row + 3) - steps_k
        skip = 0
        if i < steps_k:
            left, right, top, at, down = x, w, row, i * BLOCK_K, own * W_SPAN
        elif EXPERTS:
            left, right, top, at, down = h, b, row, (i - steps_k) * BLOCK_K, own * SPAN
        else:
            step = tl.load(steps + base + i)
            left, top = h, (at_row + step // 32768) * BLOCK_M
            right, at, down, skip = _place_of(step, b, tails, SPAN, TRANS_B, BLOCK_K)
        wt = right.load([down + col, at - skip]).T if TRANS_B else right.load([down + at - skip, col])
        acc = tl.dot(left.load([top, at]), wt, acc)
        if i == end - 1:
            first, last = tl.load(route + ROUTE * at_row), tl.load(route + ROUTE * at_row + 1)
            if EXPERTS:
                finish_tma(
                    acc,
                    (
                        (out, out_at), pre_scale if pre_scale is None else (pre_scale, pre_scale_at), None, g,
                        (ids, first, last), bias if bias is None else bias + tl.cast(first, tl.int64) * BIAS_SPAN,
                    ),
                    row, col, last, N, "segments", EPILOGUE_SUBTILE, "rows",
                )
            else:
                ends = (out, pre_scale, residual, g, (ids, first, last), bias)
                finish_tma(acc, ends, row, col, M, N, "segments", EPILOGUE_SUBTILE)
            acc = zeros(BLOCK_M, BLOCK_N)


@kernel("x x_scale w w_scale h b out pre_scale g", "M N K x, M N R h")
def multi_codes_kernel(
    x, w, x_scale, w_scale, h, b, out, pre_scale, out_at, pre_scale_at, g, bias, route, M, N, K, R, groups,
    SPAN, W_SPAN, K_SPAN, BIAS_SPAN, MOST, BN: tl.constexpr, BK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EPILOGUE_SUBTILE: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """EXPERTS, x and w of codes: so many rows, W_SPAN, or columns, K_SPAN, of w from one W to the next."""
    rows = tl.load(route + ROUTE * MOST) * BLOCK_M
    if tl.program_id(0) >= tl.cdiv(rows, BLOCK_M) * tl.cdiv(N, BLOCK_N):
        return
    row, col = tile_of_product(tl.program_id(0), rows, N, BLOCK_M, BLOCK_N, GROUP_M)
    record = route + ROUTE * (row // BLOCK_M)
    own, last, row = tl.load(record), tl.load(record + 1), tl.load(record + 3)
    acc = scaled_codes(
        zeros(BLOCK_M, BLOCK_N), x, w, x_scale, w_scale, row, col, M, N, K, groups, BN, BK,
        BLOCK_M, BLOCK_N, BLOCK_K, own * W_SPAN, own * K_SPAN,
    )
    acc = slabs(acc, h, b, row, own * SPAN + col, tl.cdiv(R, BLOCK_R), True, BLOCK_R)
    finish_tma(
        acc,
        (
            (out, out_at), pre_scale if pre_scale is None else (pre_scale, pre_scale_at), None, g, (None, own, own),
            bias if bias is None else bias + tl.cast(own, tl.int64) * BIAS_SPAN,
        ),
        row, col, last, N, "segments", EPILOGUE_SUBTILE, "rows",
    )


@triton.jit
def low_rank_terms(
    h, b, offsets, ranks, first, last, row, col, M, N, G, R,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """h_a b_a in the rows of each adapter of the tile; what is not finite in one reaches no row of another."""
    b, stride_ba, stride_br, stride_bn = b
    acc = zeros(BLOCK_M, BLOCK_N)
    t, n, r = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    for a in range(first, tl.minimum(last + 1, G)):
        lo, hi = bounds_of(offsets, a, G, M)
        mine = (t >= lo) & (t < hi)
        rank = tl.where(lo < hi, rank_of(ranks, a, G, R), 0)
        part = zeros(BLOCK_M, BLOCK_N)
        at_h = addresses(h, t, r)
        at_b = addresses(Matrix(b + tl.cast(a, tl.int64) * stride_ba, stride_br, stride_bn), r, n)
        for r0 in range(0, rank, BLOCK_R):  # not products(): its mask of rows, one comparison, made float32 spill more
            ht = tl.load(at_h, mask=both(mine, r < rank - r0), other=0.0)
            bt = tl.load(at_b, mask=within(r, n, rank - r0, N), other=0.0)
            part = tl.dot(ht, bt.to(ht.dtype), part, input_precision="ieee")
            at_h += BLOCK_R
            at_b += BLOCK_R * stride_br
        acc += tl.where(mine[:, None], part, 0.0)
    return acc


@kernel("x w h b out pre_scale residual g", "M N K x, M N R x")
def multi_gemm_pointer_kernel(
    x, w, h, b, out, pre_scale, residual, g, bias, ids, keys, offsets, ranks, route, M, N, K, R, G, BIAS_SPAN, MOST,
    stride_xm, stride_xk, stride_we, stride_wk, stride_wn, stride_hm, stride_ba, stride_br, stride_bn,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    rows = tl.load(route + ROUTE * MOST) * BLOCK_M if EXPERTS else M
    if tl.program_id(0) >= tl.cdiv(rows, BLOCK_M) * tl.cdiv(N, BLOCK_N):
        return
    row, col = tile_of_product(tl.program_id(0), rows, N, BLOCK_M, BLOCK_N, GROUP_M)
    record = route + ROUTE * (row // BLOCK_M)
    first, last, stop = tl.load(record), tl.load(record + 1), M
    if EXPERTS:
        row, stop, last = tl.load(record + 3), last, first
        w += tl.cast(first, tl.int64) * stride_we
        if bias is not None:
            bias += tl.cast(first, tl.int64) * BIAS_SPAN
    acc = low_rank_terms(
        Matrix(h, stride_hm, None), (b, stride_ba, stride_br, stride_bn), offsets, ranks, first, last, row, col, M, N, G, R,
        BLOCK_M, BLOCK_N, BLOCK_R,
    )
    if keys is not None:
        t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        acc = tl.where(keep_by_segments(keys, t, n, M), acc, 0.0)
    x, w = Matrix(x, stride_xm, stride_xk), Matrix(w, stride_wk, stride_wn)
    acc = products(acc, x, w, row, col, stop, N, K, BLOCK_K, "ieee")
    ends = (out, pre_scale, residual, g, (ids, first, last), bias)
    finish(acc, ends, row, col, stop, N, "segments")


@kernel("v other h b out pre_scale residual g", "M N R h")
def multi_epilogue_kernel(
    v, other, h, b, out, pre_scale, residual, g, bias, ids, keys, offsets, order, ranks, route, seed, keep_scale,
    M, N, R, G, stride_hm, stride_ba, stride_br, stride_bn,
    OTHER: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """The same on a product that is there. By ``order`` rows of v and out are sorted. Without g dropout masks the term of low
    rank. OTHER, beside PEFT's dropout: with g ``other`` is D(x) W^T, or what the dropped part of x makes as "codes"; without g
    it is in the mask, or as "codes" stands where that is not."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    first, last = tl.load(route + ROUTE * tl.program_id(0)), tl.load(route + ROUTE * tl.program_id(0) + 1)
    t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    place, inside = place_of(order, t, t < M), within(t, n, M, N)
    there = tl.load(addresses(Matrix(v, N, None), place, n), mask=inside, other=0.0)  # on its way while the products run
    acc = low_rank_terms(
        Matrix(h, stride_hm, None), (b, stride_ba, stride_br, stride_bn), offsets, ranks, first, last, row, col, M, N, G, R,
        BLOCK_M, BLOCK_N, BLOCK_R,
    )
    there, whole, less = there.to(tl.float32), acc, 0.0
    if OTHER != "":
        beside = tl.load(addresses(Matrix(other, N, None), t, n), mask=inside, other=0.0).to(tl.float32)
        if OTHER == "product":
            acc += beside
        else:
            less = beside
    if g is None and keys is not None:
        acc = tl.where(keep_by_segments(keys, t, n, M), acc, less)
    if g is not None and OTHER == "codes":
        if APART:
            keep_scale = scale_of(seed, vector(ids, t, M), G)[:, None]
        acc += (there - less) * keep_scale
    elif g is None or OTHER == "":
        acc += there
    if pre_scale is not None:
        store(acc, Matrix(pre_scale, N, None), t, n, M, N)
    if g is not None:
        if OTHER != "":
            acc = whole + there + by_segments(acc, g, (ids, first, last), t, n, M, N) - acc
        else:
            acc = by_segments(acc, g, (ids, first, last), t, n, M, N)
    if bias is not None:
        acc += vector(bias, n, N).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(addresses(Matrix(residual, N, None), place, n), mask=inside, other=0.0).to(tl.float32)
    tl.store(addresses(Matrix(out, N, None), place, n), acc.to(out.dtype.element_ty), mask=inside)
