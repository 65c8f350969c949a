"""Backward's elementwise pass and the sums over the tokens of each adapter; see fdora/triton/multi_bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import EPS
from fdora.triton.kernels.multi import bounds_of, pair_of, rank_of
from fdora.triton.kernels.scale import dot_rows
from fdora.triton.kernels.tile import column_at, row_at
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def multi_scale_kernel(
    dy, saved, h, g, offsets, dz, partial_m, partial_bias, partial_B, M, G, N, R, stride_dy, stride_saved, stride_hm,
    HAS_G: tl.constexpr, NEED_DZ: tl.constexpr, NEED_M: tl.constexpr, NEED_BIAS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_G: tl.constexpr,
    FLAT: tl.constexpr,
):
    """dz = g dy, and of each pair of a strip of ROWS rows and a segment the sums of dy v, dy and dz^T h. As scale_kernel: loads
    ahead of stores, sums one to an element."""
    n = column_at(tl.cdiv(N, BLOCK_N), FLAT) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    pair = row_at(tl.cdiv(N, BLOCK_N), FLAT)
    _, a, lo, hi = pair_of(pair, offsets, G, M, ROWS, BLOCK_G)
    if HAS_G:
        ga = tl.load(g + tl.cast(a, tl.int64) * N + n, mask=in_n, other=0.0)[None, :]
    all_m = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    all_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        sum_B = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for i in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
        t = i + tl.arange(0, BLOCK_M)
        mask = (t < hi)[:, None] & in_n[None, :]
        row = t[:, None].to(tl.int64)
        d = tl.load(dy + row * stride_dy + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_M:
            v = tl.load(saved + row * stride_saved + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_DZ:
            if BLOCK_R > 0:
                ht = tl.load(h + row * stride_hm + r[None, :], mask=(t < hi)[:, None] & (r < R)[None, :], other=0.0)
            z = (d * ga if HAS_G else d).to(dz.dtype.element_ty)
            tl.store(dz + row * N + n[None, :], z, mask=mask)
            if BLOCK_R > 0:
                sum_B = tl.dot(tl.trans(z), ht, sum_B)
        if NEED_M:
            all_m += d * v
        if NEED_BIAS:
            all_bias += d
    sum_m, sum_bias = tl.sum(all_m, axis=0), tl.sum(all_bias, axis=0)
    at = pair.to(tl.int64) * N + n
    if NEED_M:
        tl.store(partial_m + at, sum_m, mask=in_n)
    if NEED_BIAS:
        tl.store(partial_bias + at, sum_bias, mask=in_n)
    if BLOCK_R > 0:
        tl.store(partial_B + at[:, None] * R + r[None, :], sum_B, mask=in_n[:, None] & (r < R)[None, :])


@triton.jit
def _store_finished(dg, ga, ca, dm, dc, at, mask, NEED_M: tl.constexpr, NEED_C: tl.constexpr):
    """dm = dg / c and dc = -dm g."""
    out = dg / tl.where(ca < EPS, EPS, ca)
    if NEED_M:
        tl.store(dm + at, out.to(dm.dtype.element_ty), mask=mask)
    if NEED_C:
        tl.store(dc + at, tl.where(ca > EPS, -out * ga, 0.0), mask=mask)


@triton.jit(launch_metadata=launched)
def multi_finish_kernel(
    dy, x, w, h, b, g, c, offsets, partial_m, dm, dc, M, G, N, K, R, tiny,
    stride_dy, stride_xm, stride_we, stride_wn, stride_wk, stride_hm, stride_ba, stride_bn, stride_br,
    NEED_M: tl.constexpr, NEED_C: tl.constexpr, SAVED_PRE_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The gradients of m and c of one adapter: its pairs in their order, and the products again where the output lost v: a few
    columns at a time, since registers for all of them would leave room for few programs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    a = tl.program_id(1)
    at = tl.cast(a, tl.int64) * N + n  # before the bounds are there: a trip to memory is what a program takes
    ga, ca = tl.load(g + at, mask=in_n, other=1.0), tl.load(c + at, mask=in_n, other=1.0)
    lo, hi = bounds_of(offsets, a, G, M)
    dg = tl.zeros((BLOCK_N,), tl.float32)
    first, end = lo // ROWS, tl.where(lo < hi, (hi + ROWS - 1) // ROWS, lo // ROWS)
    for strip in range(first, end, BLOCK_T):
        t = strip + tl.arange(0, BLOCK_T)
        of = partial_m + (t + a)[:, None].to(tl.int64) * N + n[None, :]
        dg += tl.sum(tl.load(of, mask=(t < end)[:, None] & in_n[None, :], other=0.0), axis=0)
    if SAVED_PRE_SCALE:
        _store_finished(dg, ga, ca, dm, dc, at, in_n, NEED_M, NEED_C)
    else:
        dg = dg / tl.where(tl.abs(ga) < tiny, 1.0, ga)
        again = tl.abs(ga) < tl.where(lo < hi, tiny, 0.0)
        _store_finished(dg, ga, ca, dm, dc, at, in_n & ~again, NEED_M, NEED_C)
        if tl.max((again & in_n).to(tl.int32), axis=0) > 0:
            top = lo.to(tl.int64)
            dya, ba = dy + top * stride_dy, b + tl.cast(a, tl.int64) * stride_ba
            xa, wa, ha = x + top * stride_xm, w + tl.cast(a, tl.int64) * stride_we, h + top * stride_hm
            for i in range(0, BLOCK_N, 32):
                few = tl.program_id(0) * BLOCK_N + i + tl.arange(0, 32)
                here = tl.cast(a, tl.int64) * N + few
                g_few, c_few = tl.load(g + here, mask=few < N, other=1.0), tl.load(c + here, mask=few < N, other=1.0)
                exact = dot_rows(dya, xa, wa, few, N, hi - lo, K, stride_dy, stride_xm, 1, stride_wn, stride_wk, 32)
                exact += dot_rows(dya, ha, ba, few, N, hi - lo, R, stride_dy, stride_hm, 1, stride_bn, stride_br, 32)
                mask = (few < N) & (tl.abs(g_few) < tiny)
                _store_finished(exact, g_few, c_few, dm, dc, here, mask, NEED_M, NEED_C)


@triton.jit(launch_metadata=launched)
def multi_grad_kernel(
    u, v, offsets, ranks, out, M, G, P, Q, R, stride_ut, stride_vt,
    HAS_RANKS: tl.constexpr, RANK_FIRST: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """u_a^T v_a over the tokens of each adapter, (G, P, Q); not SINGLE: of each pair with a strip of ROWS rows."""
    place = tl.program_id(2)
    if SINGLE:
        a = place
        lo, hi = bounds_of(offsets, a, G, M)
    else:
        _, a, lo, hi = pair_of(place, offsets, G, M, ROWS, BLOCK_G)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    begins = tl.program_id(0) * BLOCK_P if RANK_FIRST else tl.program_id(1) * BLOCK_Q
    hi = tl.where(begins < rank_of(ranks, a, G, R, HAS_RANKS), hi, lo)
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for i in range(lo, hi, BLOCK_T):
        row = (i + t).to(tl.int64)[:, None]
        here = (i + t < hi)[:, None]
        ut = tl.load(u + row * stride_ut + p[None, :], mask=here & (p < P)[None, :], other=0.0)
        vt = tl.load(v + row * stride_vt + q[None, :], mask=here & (q < Q)[None, :], other=0.0)
        acc = tl.dot(tl.trans(ut), vt, acc, input_precision=PRECISION)
    if SINGLE or a < G:
        at = (place.to(tl.int64) * P + p[:, None]) * Q + q[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(p < P)[:, None] & (q < Q)[None, :])


@triton.jit(launch_metadata=launched)
def multi_sum_kernel(partial, offsets, out, M, G, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The pairs of each adapter, ``size`` numbers each, added in their order."""
    a = tl.program_id(1)
    lo, hi = bounds_of(offsets, a, G, M)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    if lo < hi:
        for strip in range(lo // ROWS, (hi + ROWS - 1) // ROWS):
            acc += tl.load(partial + (strip + a).to(tl.int64) * size + i, mask=i < size, other=0.0)
    tl.store(out + tl.cast(a, tl.int64) * size + i, acc.to(out.dtype.element_ty), mask=i < size)
