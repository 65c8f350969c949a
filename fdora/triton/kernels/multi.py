"""Who owns which token where many adapters share a W; see fdora/triton/multi.py.

Tokens are sorted: segment a holds those of adapter a, segment G those behind the last end, which have no adapter. The pairs of
a tile of rows and a segment that meet lie on a staircase, so ``tile + segment`` numbers them: at most tiles + G of them, known
without a look at the lengths. A program of a pair finds its own by counting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.dropout import keep_keyed, keep_rows, key_of
from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.tile import Matrix, addresses, both, column_at, put, row_at, vector, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_launch_dependents

ROUTE = tl.constexpr(4)  # numbers that a tile of rows has in the table of routes
PARTS = tl.constexpr(6)  # of a sum over K, at most


@triton.jit
def bounds_of(offsets, a, G, M):
    """First token of segment a and the one behind its last. Without offsets all are those of one adapter."""
    if offsets is None:
        lo, hi = tl.where(a > 0, M, 0), M
    else:
        lo, hi = tl.load(offsets + a - 1, mask=a > 0, other=0), vector(offsets, a, G, M)
    return tl.minimum(lo, M), tl.minimum(hi, M)


@triton.jit
def ratio_of(seed, a, G):
    """Behind all seeds, where each adapter has its own; 0 behind the last."""
    return vector((seed + G).to(tl.pointer_type(tl.float64)), a, G)


@triton.jit
def scale_of(seed, a, G):
    """1 / (1 - p) where each adapter has its p."""
    return (1.0 / (1.0 - ratio_of(seed, a, G))).to(tl.float32)


@triton.jit
def mask_of(seed, threshold, a, offsets, M, G, APART: tl.constexpr):
    """What the mask of adapter a is drawn from: its seed, its ratio as a threshold, and its first token, from which tokens
    count. APART: each has its ratio."""
    lo, _ = bounds_of(offsets, a, G, M)
    if APART:
        threshold = (ratio_of(seed, a, G) * 4294967296.0).to(tl.int64)
    return vector(seed, a, G), threshold, lo


@triton.jit
def keep_by_segments(keys, t, k, M):
    """Where the elements (t, k) survive: of each token ``keys`` has what its adapter draws from, then all thresholds."""
    return keep_keyed(vector(keys, t, M).to(tl.uint32)[:, None], vector(keys + M, t, M)[:, None], k[None, :])


@triton.jit
def segments_of(t, offsets, G, BLOCK_G: tl.constexpr):
    """The segment of each token t: how many end before it."""
    found = tl.zeros_like(t)
    for a0 in range(0, G, BLOCK_G):
        a = a0 + tl.arange(0, BLOCK_G)
        end = vector(offsets, a, G, 0x7FFFFFFF)
        found += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), axis=1)
    return found


@triton.jit
def place_of(order, t, inside):
    """Where these sorted tokens lie."""
    return t if order is None else tl.load(order + t, mask=inside, other=0)


@triton.jit
def valid(ids, G):
    """The adapters that ids stand for, G for none."""
    return tl.where((ids < 0) | (ids >= G), G, ids).to(tl.int32)


@triton.jit
def adapters_of(t, ids, offsets, M, G, BLOCK_G: tl.constexpr):
    """The adapter of each token t, by ids or sorted by segments; G for none."""
    return segments_of(t, offsets, G, BLOCK_G) if ids is None else valid(vector(ids, t, M, -1), G)


@triton.jit
def adapter_of(t, ids, offsets, M, G, BLOCK_G: tl.constexpr):
    """The same of one token."""
    return tl.sum(adapters_of(t + tl.arange(0, 1), ids, offsets, M, G, BLOCK_G), axis=0)


@triton.jit
def pair_of(pair, offsets, G, M, ROWS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Tile and segment of this number, the first token in both and the one behind the last: none where they do not meet."""
    a = pair * 0
    for a0 in range(0, G, BLOCK_G):
        before = a0 + tl.arange(0, BLOCK_G)
        end = M if offsets is None else tl.minimum(vector(offsets, before, G), M)  # where the segment after it begins
        a += tl.sum(((end // ROWS + before + 1 <= pair) & (before < G)).to(tl.int32), axis=0)
    lo, hi = bounds_of(offsets, a, G, M)
    tile = pair - a
    return tile, a, tl.maximum(lo, tile * ROWS), tl.minimum(hi, (tile + 1) * ROWS)


@triton.jit
def rank_of(ranks, a, G, R):
    """The true rank of adapter a, 0 where there is none."""
    r = vector(ranks, a, G) if ranks is not None else R
    return tl.where(a < G, r, 0)


@triton.jit
def g_of_adapter(m, c, a, n, G, N):
    """g of adapter a at columns n; 1 behind the last one."""
    ga = tl.full((n.shape[0],), 1.0, tl.float32)
    if m is not None:  # noqa: SIM102  it must not be looked at
        if a < G:
            at = tl.cast(a, tl.int64) * N
            ga = g_tile(m + at, c + at, n, N)
    return ga


@kernel("ranks")
def multi_ranks_kernel(ranks, G, first, w0, w1, w2, w3, w4, w5, w6, w7):
    """32 ranks from 8 integers, four of 15 bits in each: numbers of the plan, as a table on the device."""
    i = tl.arange(0, 32)
    word = i // 4
    low = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    high = tl.where(word == 4, w4, tl.where(word == 5, w5, tl.where(word == 6, w6, w7)))
    r = (tl.where(word < 4, low, high) >> (15 * (i % 4)).to(tl.int64)) & 0x7FFF
    tl.store(ranks + first + i, r.to(tl.int32), mask=first + i < G)


@triton.jit
def _is_finite(flags, a, G, FLAGS: tl.constexpr):
    """Whether all of each of these adapters is."""
    i = tl.arange(0, FLAGS)
    bad = tl.load(flags + a[:, None] * FLAGS + i[None, :], mask=i[None, :] < tl.where(a < G, FLAGS, 0)[:, None], other=0)
    return tl.max(bad, axis=1) == 0


@triton.jit
def _route(
    tile, offsets, ranks, flags, seed, threshold, ids, keys, route, steps, M, G, R, span,
    APART: tl.constexpr, FLAGS: tl.constexpr, TAILS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = tile * BLOCK_M
    t = row + tl.arange(0, BLOCK_M)
    mine = segments_of(t, offsets, G, BLOCK_G)
    put(mine, ids, t, M)
    if keys is not None:
        bits, least, begin = mask_of(seed, threshold, mine, offsets, M, G, APART)
        put(key_of(bits, t - begin), keys, t, M)
        put(tl.zeros_like(t) + least, keys + M, t, M)
    first = tl.min(mine, axis=0)
    last = tl.max(tl.where(t < M, mine, 0), axis=0)
    base = (tile + first) * span
    count = tile * 0
    for a0 in range(first, tl.minimum(last + 1, G), BLOCK_G):
        a = a0 + tl.arange(0, BLOCK_G)
        known = a < G
        lo = tl.load(offsets + a - 1, mask=known & (a > 0), other=0)
        hi = tl.load(offsets + a, mask=known, other=0)
        here = known & (tl.maximum(lo, row) < tl.minimum(tl.minimum(hi, M), row + BLOCK_M))
        r = tl.load(ranks + a, mask=known, other=0) if ranks is not None else tl.where(known, R, 0)
        slabs = tl.where(here, (r + BLOCK_R - 1) // BLOCK_R, 0)
        if FLAGS > 0:  # zeros times what is not finite would reach the rows of others: its own get a NaN by g
            slabs = tl.where(_is_finite(flags, a, G, FLAGS) | (first == last), slabs, 0)
        at = base + count + tl.cumsum(slabs, axis=0) - slabs
        for i in range(0, span):
            step = a * 32768 + i
            if TAILS:  # the highest bit of a slab: it lies apart
                step += tl.where((i + 1) * BLOCK_R > r, 16384, 0)
            put(step, steps + at, i, slabs)
        count += tl.sum(slabs, axis=0)
    tl.store(route + ROUTE * tile, first)
    tl.store(route + ROUTE * tile + 1, last)
    tl.store(route + ROUTE * tile + 2, count)
    tl.store(route + ROUTE * tile + 3, base)


@triton.jit
def _route_experts(tile, offsets, route, M, G, slabs, tiles, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """Segments have tiles of their own, one segment's after the other's: segment, the row behind its last, steps of low rank
    and the tile's first row. Behind all ``tiles`` that there may be: how many there are."""
    e, ahead, total = tile * 0, tile * 0, tile * 0
    for a0 in range(0, G, BLOCK_G):
        a = a0 + tl.arange(0, BLOCK_G)
        lo = tl.minimum(tl.load(offsets + a - 1, mask=(a > 0) & (a < G), other=0), M)
        hi = tl.minimum(vector(offsets, a, G), M)
        own = tl.where((a < G) & (hi > lo), (hi - lo + BLOCK_M - 1) // BLOCK_M, 0)
        ends = total + tl.cumsum(own, axis=0)
        before = (ends <= tile) & (a < G)
        e += tl.sum(before.to(tl.int32), axis=0)
        ahead += tl.sum(tl.where(before, own, 0), axis=0)
        total += tl.sum(own, axis=0)
    if tile < total:
        lo, hi = bounds_of(offsets, e, G, M)
        tl.store(route + ROUTE * tile, e)
        tl.store(route + ROUTE * tile + 1, hi)
        tl.store(route + ROUTE * tile + 2, slabs)
        tl.store(route + ROUTE * tile + 3, lo + (tile - ahead) * BLOCK_M)
    if tile == 0:
        tl.store(route + ROUTE * tiles, tl.minimum(total, tiles))


@triton.jit
def _zero_tail(strip, out, offsets, M, G, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows behind the last segment have no W."""
    t = strip * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.load(offsets + G - 1)
    if (strip + 1) * BLOCK_M > begin:
        mine = (t >= begin) & (t < M)
        for n0 in range(0, width, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            at, zeros = addresses(Matrix(out, width, None), t, n), tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
            tl.store(at, zeros, mask=both(mine, n < width))


@kernel("ids g")
def multi_routes_kernel(
    offsets, ranks, flags, m, c, seed, threshold, ids, keys, route, steps, g, out, pre_scale, M, G, N, R, span, tiles, blocks,
    width, APART: tl.constexpr, FLAGS: tl.constexpr, EXPERTS: tl.constexpr, TAILS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Of each tile of rows: its first and last segment, and its steps of low rank (adapter and slab), one after the other.
    Of each token its segment and what dropout draws from, and of each segment g: 1 behind the last adapter.
    EXPERTS: see _route_experts; the last programs write zeros behind the last segment of ``out`` and ``pre_scale``,
    ``width`` columns."""
    pid = tl.program_id(0)
    if pid < tiles:
        if EXPERTS:
            _route_experts(pid, offsets, route, M, G, span, tiles, BLOCK_M, BLOCK_G)
        else:
            _route(
                pid, offsets, ranks, flags, seed, threshold, ids, keys, route, steps, M, G, R, span, APART, FLAGS,
                TAILS, BLOCK_M, BLOCK_R, BLOCK_G,
            )
    elif EXPERTS and pid >= tiles + blocks:
        if out is not None:  # backward without a dx
            _zero_tail(pid - tiles - blocks, out, offsets, M, G, width, 64, 64)
        if pre_scale is not None:
            _zero_tail(pid - tiles - blocks, pre_scale, offsets, M, G, width, 64, 64)
    elif g is not None:
        across = tl.cdiv(N, BLOCK_N)
        a = (pid - tiles) // across
        n = (pid - tiles) % across * BLOCK_N + tl.arange(0, BLOCK_N)
        ga = g_of_adapter(m, c, a, n, G, N)
        if FLAGS > 0:
            i = tl.arange(0, FLAGS)
            bad = vector(flags + a * FLAGS, i, tl.where(a < G, FLAGS, 0))
            ga = tl.where(tl.max(bad, axis=0) == 0, ga, float("nan"))
        put(ga, g + tl.cast(a, tl.int64) * N, n, N)


@triton.jit
def _place_of_h(
    offsets, ranks, M, G, R, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Of a program of h: its first token and the row of pad for it, its adapter and the bounds of that one's segment, its first
    rank and how many the adapter has."""
    pair = row_at(tl.cdiv(R, BLOCK_R), FLAT) // (TILE // BLOCK_M)
    inside = row_at(tl.cdiv(R, BLOCK_R), FLAT) % (TILE // BLOCK_M) * BLOCK_M
    tile, a, lo, hi = pair_of(pair, offsets, G, M, TILE, BLOCK_G)
    first_r = column_at(tl.cdiv(R, BLOCK_R), FLAT) * BLOCK_R
    return tile * TILE + inside, pair * TILE + inside, a, lo, hi, first_r, rank_of(ranks, a, G, R)


@triton.jit
def _put_h(
    acc, first, row, a, mine, r, rank, s, only_s, seed, h, pad, gain, G, R, stride_hm, stride_pm, APART: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """s_a times what was summed, into h and pad."""
    t = first + tl.arange(0, BLOCK_M)
    known, scale = both(mine, r < rank), only_s
    if s is not None:
        scale = vector(s, a, G)
    if APART:
        scale *= scale_of(seed, a, G)
    elif gain is not None:
        scale *= gain
    out = tl.where(known, acc * scale, 0.0).to(h.dtype.element_ty)
    mask = both(mine, r < R)
    tl.store(addresses(Matrix(h, stride_hm, None), t, r), out, mask=mask)
    if pad is not None and EXPERTS:
        tl.store(addresses(Matrix(pad, stride_pm, None), t, r), out, mask=mask)
    elif pad is not None:
        row = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        tl.store(addresses(Matrix(pad, stride_pm, None), row, r), out, mask=(r < R)[None, :] & (row >= 0)[:, None])


@kernel("x f h pad parts", "M R K x")
def multi_h_kernel(
    x, f, s, only_s, offsets, order, ranks, seed, h, pad, parts, threshold, gain, M, G, K, R, split,
    stride_xm, stride_xk, stride_fa, stride_fk, stride_fr, stride_hm, stride_pm,
    MASKED: tl.constexpr, APART: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr,
):
    """s_a x f_a for the rows of each adapter, (M, R). ``pad``: by pairs with the tiles of the product, TILE rows each, zeros
    where a row belongs to another adapter. EXPERTS: the same rows as h, further apart. ``gain``: of dropout, APART that of the
    adapter. MASKED: x is dropped. ``parts`` (split, M, R): sums over a part of K each, in the place of h and pad.
    ``only_s``: where there is one adapter, in the place of s."""
    if PDL:
        gdc_launch_dependents()
    first, row, a, lo, hi, first_r, rank = _place_of_h(offsets, ranks, M, G, R, TILE, BLOCK_M, BLOCK_R, BLOCK_G, FLAT)
    if lo < hi:
        begins, ends = 0, K
        if parts is not None:
            along = tl.cdiv(tl.cdiv(K, BLOCK_K), split) * BLOCK_K
            begins = tl.program_id(2) * along
            ends = tl.minimum(K, begins + along)
        t, r, k = first + tl.arange(0, BLOCK_M), first_r + tl.arange(0, BLOCK_R), begins + tl.arange(0, BLOCK_K)
        mine = (t >= lo) & (t < hi)
        # Nothing to multiply: no row of this part is the adapter's, or the slab lies behind its rank.
        some = (first < hi) & (first + BLOCK_M > lo) & (first_r < rank)
        at_x = addresses(Matrix(x, stride_xm, stride_xk), place_of(order, t, mine), k)
        at_f = addresses(Matrix(f + tl.cast(a, tl.int64) * stride_fa, stride_fk, stride_fr), k, r)
        # By eights: a rank that is only known here would make these loads as narrow as one number. What lies beyond it stays in
        # columns of its own.
        near = (r // 8 * 8 < rank) & (r < R)
        acc = zeros(BLOCK_M, BLOCK_R)
        if MASKED:
            bits, least, origin = mask_of(seed, threshold, a, offsets, M, G, APART)
        for k0 in range(0, tl.where(some, ends - begins, 0), BLOCK_K):
            xt = tl.load(at_x, mask=both(mine, k < K - k0), other=0.0)
            if MASKED:
                xt = tl.where(keep_rows(bits, least, t - origin, k0 + k), xt, 0.0)
            ft = tl.load(at_f, mask=both(k < K - k0, near), other=0.0)
            acc = tl.dot(xt, ft.to(xt.dtype), acc, input_precision="ieee")
            at_x += BLOCK_K * stride_xk
            at_f += BLOCK_K * stride_fk
        if parts is not None:
            part = parts + tl.program_id(2).to(tl.int64) * M * R
            tl.store(addresses(Matrix(part, R, None), t, r), acc, mask=both(mine, r < rank))
        else:
            _put_h(
                acc, first, row, a, mine, r, rank, s, only_s, seed, h, pad, gain, G, R, stride_hm, stride_pm, APART, EXPERTS,
                BLOCK_M,
            )


@kernel("parts h pad")
def multi_h_sum_kernel(
    parts, s, only_s, offsets, ranks, seed, h, pad, gain, M, G, R, split, stride_hm, stride_pm, APART: tl.constexpr,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
    FLAT: tl.constexpr, PDL: tl.constexpr,
):
    """h and pad from the parts that multi_h_kernel left, added in their order."""
    if PDL:
        gdc_launch_dependents()
    first, row, a, lo, hi, first_r, rank = _place_of_h(offsets, ranks, M, G, R, TILE, BLOCK_M, BLOCK_R, BLOCK_G, FLAT)
    if lo < hi:
        t, r = first + tl.arange(0, BLOCK_M), first_r + tl.arange(0, BLOCK_R)
        mine, acc = (t >= lo) & (t < hi), zeros(BLOCK_M, BLOCK_R)
        at = addresses(Matrix(parts, R, None), t, r)
        for i in tl.static_range(PARTS):
            acc += tl.load(at + tl.cast(i, tl.int64) * M * R, mask=both(mine, r < tl.where(i < split, rank, 0)), other=0.0)
        _put_h(
            acc, first, row, a, mine, r, rank, s, only_s, seed, h, pad, gain, G, R, stride_hm, stride_pm, APART, EXPERTS,
            BLOCK_M,
        )
