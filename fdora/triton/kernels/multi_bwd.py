"""Backward's elementwise pass and the sums over the tokens of each adapter; see fdora/triton/multi_bwd.py."""

from __future__ import annotations

import triton.language as tl

from fdora.triton.kernels.act import gradient_of
from fdora.triton.kernels.g import floored, times_g
from fdora.triton.kernels.multi import bounds_of, g_of_adapter, mask_of, pair_of, rank_of, scale_of
from fdora.triton.kernels.product import over_tokens
from fdora.triton.kernels.scale import dot_rows, scaled, store_gradients, store_sums
from fdora.triton.kernels.sums import column_sums
from fdora.triton.kernels.tile import Matrix, block_on, loaded, put, store, strip_at, vector, zeros
from fdora.triton.runtime.cost import kernel


@kernel("dy saved h g dz beside partial_m partial_bias partial_B", "M N R dy?BLOCK_R")
def multi_scale_kernel(
    dy, saved, h, g, offsets, seed, dz, beside, partial_m, partial_bias, partial_B, M, G, N, R, lead, gain,
    stride_dy, stride_saved, stride_hm, APART: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr, FLAT: tl.constexpr,
):
    """dz = g dy, (lead + gain (g - 1)) dy beside it, APART by a gain of the adapter, and of each pair of a strip of ROWS rows
    and a segment the sums of dy v, dy and dz^T h."""
    n, pair = strip_at(N, BLOCK_N, FLAT)
    _, a, lo, hi = pair_of(pair, offsets, G, M, ROWS, BLOCK_G)
    ga, g_beside = None, None
    if g is not None:
        ga = vector(g + tl.cast(a, tl.int64) * N, n, N)[None, :]
        if beside is not None:
            if APART:
                gain = scale_of(seed, a, G)
            g_beside = lead + gain * (ga - 1)
    sums = scaled(
        Matrix(dy, stride_dy, None), Matrix(None if partial_m is None else saved, stride_saved, None),
        Matrix(h, stride_hm, None), dz, beside, ga, g_beside, n, 0, lo, hi, hi, N, R,
        partial_bias is not None, BLOCK_R, BLOCK_M, STAGES,
    )
    store_sums(sums, partial_m, partial_bias, partial_B, pair, n, N, R)


@kernel("da gate up dz_gate dz_up partial_gate partial_up")
def multi_gated_kernel(
    da, gate, up, m_gate, c_gate, m_up, c_up, offsets, dz_gate, dz_up, partial_gate, partial_up, M, G, N,
    stride_da, stride_gate, stride_up, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_G: tl.constexpr, FLAT: tl.constexpr,
):
    """dz of gate and of up, and the sums of dy v of both, v times g: the pass of the activation's backward with those of two
    layers."""
    n, pair = strip_at(N, BLOCK_N, FLAT)
    _, a, lo, hi = pair_of(pair, offsets, G, M, ROWS, BLOCK_G)
    g_gate, g_up = g_of_adapter(m_gate, c_gate, a, n, G, N)[None, :], g_of_adapter(m_up, c_up, a, n, G, N)[None, :]
    da, gate, up = Matrix(da, stride_da, None), Matrix(gate, stride_gate, None), Matrix(up, stride_up, None)
    sum_gate, sum_up = zeros(BLOCK_M, BLOCK_N), zeros(BLOCK_M, BLOCK_N)
    for i in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
        t = i + tl.arange(0, BLOCK_M)
        d = loaded(da, t, n, hi, N)
        z, u = loaded(gate, t, n, hi, N).to(tl.float32), loaded(up, t, n, hi, N).to(tl.float32)
        d_gate = gradient_of(d.to(tl.float32), z, u, False, ACT).to(d.dtype).to(tl.float32)
        d_up = gradient_of(d.to(tl.float32), z, u, True, ACT).to(d.dtype).to(tl.float32)
        store(times_g(d_gate, g_gate, d.dtype), Matrix(dz_gate, N, None), t, n, hi, N)
        store(times_g(d_up, g_up, d.dtype), Matrix(dz_up, N, None), t, n, hi, N)
        sum_gate += d_gate * z
        sum_up += d_up * u
    at = pair.to(tl.int64) * N + n
    tl.store(partial_gate + at, tl.sum(sum_gate, axis=0), mask=n < N)
    tl.store(partial_up + at, tl.sum(sum_up, axis=0), mask=n < N)


@kernel("partial_m")
def multi_finish_kernel(
    dy, gate, up, x, w, h, b, m, c, offsets, partial_m, dm, dc, M, G, N, K, R, tiny,
    stride_dy, stride_gate, stride_up, stride_xm, stride_we, stride_wn, stride_wk, stride_hm, stride_ba, stride_bn, stride_br,
    SAVED_PRE_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, ACT: tl.constexpr,
    OF_UP: tl.constexpr,
):
    """The gradients of m and c of one adapter: its pairs in their order, and the products again where the output lost v: a few
    columns at a time, since registers for all of them would leave room for few programs; not of codes. Beside ACT dy is da, of
    gate and up, and the layer is one of them."""
    n = block_on(0, BLOCK_N)
    in_n = n < N
    a = tl.program_id(1)
    at = tl.cast(a, tl.int64) * N + n  # before the bounds are there: a trip to memory is what a program takes
    ma, ca = tl.load(m + at, mask=in_n, other=1.0), tl.load(c + at, mask=in_n, other=1.0)
    ga = tl.div_rn(ma.to(tl.float32), floored(ca))
    lo, hi = bounds_of(offsets, a, G, M)
    first, end = lo // ROWS, tl.where(lo < hi, (hi + ROWS - 1) // ROWS, lo // ROWS)
    dg = column_sums(partial_m + (first + a).to(tl.int64) * N, n, N, N, end - first, BLOCK_T)
    if SAVED_PRE_SCALE:
        store_gradients(dg, ga, ca, dm, dc, at, in_n)
    else:
        dg = dg / tl.where(tl.abs(ga) < tiny, 1.0, ga)
        again = tl.abs(ga) < tl.where(lo < hi, tiny, 0.0)
        store_gradients(dg, ga, ca, dm, dc, at, in_n & ~again)
        if w is not None and tl.max((again & in_n).to(tl.int32), axis=0) > 0:
            top = lo.to(tl.int64)
            own_dy, own_h = Matrix(dy + top * stride_dy, stride_dy, None), Matrix(h + top * stride_hm, stride_hm, None)
            below = own_dy if ACT == "" else (
                own_dy, Matrix(gate + top * stride_gate, stride_gate, None), Matrix(up + top * stride_up, stride_up, None),
            )
            own_x = Matrix(x + top * stride_xm, stride_xm, None)
            own_w = Matrix(w + tl.cast(a, tl.int64) * stride_we, stride_wn, stride_wk)
            own_b = Matrix(b + tl.cast(a, tl.int64) * stride_ba, stride_bn, stride_br)
            for i in range(0, BLOCK_N, 32):
                few = tl.program_id(0) * BLOCK_N + i + tl.arange(0, 32)
                here = tl.cast(a, tl.int64) * N + few
                m_few, c_few = tl.load(m + here, mask=few < N, other=1.0), tl.load(c + here, mask=few < N, other=1.0)
                g_few = tl.div_rn(m_few.to(tl.float32), floored(c_few))
                exact = dot_rows(below, own_x, own_w, few, N, hi - lo, K, ACT, OF_UP)
                exact += dot_rows(below, own_h, own_b, few, N, hi - lo, R, ACT, OF_UP)
                mask = (few < N) & (tl.abs(g_few) < tiny)
                store_gradients(exact, g_few, c_few, dm, dc, here, mask)


@kernel("u v out", "M P Q u")
def multi_grad_kernel(
    u, v, offsets, ranks, seed, out, threshold, gain, M, G, P, Q, R, stride_ut, stride_vt,
    MASKED: tl.constexpr, APART: tl.constexpr, RANK_FIRST: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """u_a^T v_a over the tokens of each adapter, (G, P, Q); not SINGLE: of each pair with a strip of ROWS rows. MASKED: v
    is dropped, its survivors times ``gain``."""
    place = tl.program_id(2)
    if SINGLE:
        a = place
        lo, hi = bounds_of(offsets, a, G, M)
    else:
        _, a, lo, hi = pair_of(place, offsets, G, M, ROWS, BLOCK_G)
    p, q = block_on(0, BLOCK_P), block_on(1, BLOCK_Q)
    begins = tl.program_id(0) * BLOCK_P if RANK_FIRST else tl.program_id(1) * BLOCK_Q
    hi = tl.where(begins < rank_of(ranks, a, G, R), hi, lo)
    u, v = Matrix(u, stride_ut, None), Matrix(v, stride_vt, None)
    mask = None
    if MASKED:
        mask = mask_of(seed, threshold, a, offsets, M, G, APART)
    acc = over_tokens(u, v, p, q, lo, hi, P, Q, BLOCK_T, "ieee", mask)
    if gain is not None:
        acc *= gain
    if SINGLE or a < G:
        store(acc, Matrix(out + place.to(tl.int64) * P * Q, Q, None), p, q, P, Q)


@kernel("partial out")
def multi_sum_kernel(partial, offsets, out, M, G, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The pairs of each adapter, ``size`` numbers each, added in their order."""
    a = tl.program_id(1)
    lo, hi = bounds_of(offsets, a, G, M)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = zeros(BLOCK)
    if lo < hi:
        for strip in range(lo // ROWS, (hi + ROWS - 1) // ROWS):
            acc += vector(partial + (strip + a).to(tl.int64) * size, i, size)
    put(acc, out + tl.cast(a, tl.int64) * size, i, size)
