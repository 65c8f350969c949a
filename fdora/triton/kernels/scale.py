"""Backward's elementwise pass and the sums over tokens; see fdora/triton/scale.py and factors.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.act import gradient_of
from fdora.triton.kernels.g import EPS, g_tile, times_g
from fdora.triton.kernels.product import over_tokens
from fdora.triton.kernels.sums import column_sums
from fdora.triton.kernels.tile import Matrix, addresses, block_on, loaded, put, store, strip_at, vector, within, zeros
from fdora.triton.runtime.cost import ANY_LENGTH, kernel
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait

NO_ACT = tl.constexpr("")


@triton.jit
def dy_at(dy, t, n, M, N, ACT: tl.constexpr, OF_UP: tl.constexpr):
    """dy, loaded; beside ACT it is formed of da, gate and up, and rounded as the activation's own pass rounds it."""
    if ACT == "":
        return loaded(dy, t, n, M, N)
    else:
        z, u = loaded(dy[1], t, n, M, N).to(tl.float32), loaded(dy[2], t, n, M, N).to(tl.float32)
        d = loaded(dy[0], t, n, M, N)
        return gradient_of(d.to(tl.float32), z, u, OF_UP, ACT).to(d.dtype)


@triton.jit
def over_few(dy, x, n, k, N, M, K, ACT: tl.constexpr = NO_ACT, OF_UP: tl.constexpr = False):
    """dy^T x at the columns n of dy and k of x. As over_tokens, but that x is asked for behind dy: both at once spill."""
    v = zeros(n.shape[0], k.shape[0])
    for t0 in range(0, M, 32):
        t = t0 + tl.arange(0, 32)
        v = tl.dot(tl.trans(dy_at(dy, t, n, M, N, ACT, OF_UP)), loaded(x, t, k, M, K), v)
    return v


@triton.jit
def dot_rows(dy, x, w, n, N, M, K, ACT: tl.constexpr = NO_ACT, OF_UP: tl.constexpr = False):
    """sum_k (dy^T x)_nk w_nk for the columns n of dy."""
    total = tl.zeros(n.shape, tl.float32)
    for k0 in range(0, K, 32):
        k = k0 + tl.arange(0, 32)
        v = over_few(dy, x, n, k, N, M, K, ACT, OF_UP)
        total += tl.sum(v * loaded(w, n, k, N, K).to(tl.float32), axis=1)
    return total


@triton.jit
def store_gradients(dg, g, c, dm, dc, at, mask):
    """dm = dg / c and dc = -dm g, of norms c."""
    out = dg / tl.where(c < EPS, EPS, c)
    if dm is not None:
        tl.store(dm + at, out.to(dm.dtype.element_ty), mask=mask)
    if dc is not None:
        tl.store(dc + at, tl.where(c > EPS, -out * g, 0.0), mask=mask)


@triton.jit
def _finish(sum_m, sum_bias, dy, x, w, h, b, m, c, out, n, N, M, K, R, tiny, SAVED_PRE_SCALE: tl.constexpr):
    """From the sums over all tokens to the gradients of m, c and bias for the columns n. Lost ones take W, if it is there."""
    dm, dc, dbias = out
    if dm is not None or dc is not None:
        g = g_tile(m, c, n, N)
        dg = sum_m
        if not SAVED_PRE_SCALE:
            lost = (tl.abs(g) < tiny) & (n < N)
            dg = sum_m / tl.where(lost, 1.0, g)
            # float32 always keeps pre_scale (linear.py), so the products here are of half precision.
            if w.p is not None and tl.max(lost.to(tl.int32), axis=0) > 0:
                exact = dot_rows(dy, x, w, n, N, M, K)
                exact += dot_rows(dy, h, b, n, N, M, R)
                dg = tl.where(lost, exact, dg)
        store_gradients(dg, g, vector(c, n, N, 1.0), dm, dc, n, n < N)
    if dbias is not None:
        put(sum_bias, dbias, n, N)


@triton.jit
def scaled(
    dy, saved, h, dz, beside, g, g_beside, n, first, begin, end, M, N, R,
    WITH_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):
    """dz = g dy (and beside it dy with another factor) of the tokens up to M from ``first`` + ``begin`` to ``first`` + ``end``,
    and their sums of dy v, dy and dz^T h. Everything is loaded before anything is stored: no load is moved ahead of a store.
    Sums stay one to an element of the tile until the end: their reduction asks the warps to meet."""
    all_m = zeros(BLOCK_M, n.shape[0])
    all_bias = zeros(BLOCK_M, n.shape[0])
    r = tl.arange(0, BLOCK_R if BLOCK_R > 0 else 1)
    sum_B = zeros(n.shape[0], r.shape[0])
    for i in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        t = first + i + tl.arange(0, BLOCK_M)
        given = loaded(dy, t, n, M, N)
        d = given.to(tl.float32)
        if saved.p is not None:
            v = loaded(saved, t, n, M, N).to(tl.float32)
        if BLOCK_R > 0:
            ht = loaded(h, t, r, M, R)
        if dz is not None or BLOCK_R > 0:
            z = given if g is None else times_g(d, g, given.dtype)
        if dz is not None:
            store(z, Matrix(dz, N, None), t, n, M, N)
        if beside is not None:
            store(times_g(d, g_beside, beside.dtype.element_ty), Matrix(beside, N, None), t, n, M, N)
        if saved.p is not None:
            all_m += d * v
        if WITH_BIAS:
            all_bias += d
        if BLOCK_R > 0:
            sum_B = tl.dot(tl.trans(z), ht, sum_B)
    return tl.sum(all_m, axis=0), tl.sum(all_bias, axis=0), sum_B


@triton.jit
def store_sums(sums, partial_m, partial_bias, partial_B, strip, n, N, R):
    """The sums of a strip, (strips, N) and (strips, N, R)."""
    sum_m, sum_bias, sum_B = sums
    at = strip.to(tl.int64) * N + n
    if partial_m is not None:
        tl.store(partial_m + at, sum_m, mask=n < N)
    if partial_bias is not None:
        tl.store(partial_bias + at, sum_bias, mask=n < N)
    if partial_B is not None:
        r = tl.arange(0, sum_B.shape[1])
        tl.store(partial_B + at[:, None] * R + r[None, :], sum_B, mask=within(n, r, N, R))


@kernel("dy dz beside partial_m partial_bias partial_B saved?dm|dc h?BLOCK_R dB?SINGLE", "M N R dy?BLOCK_R", **ANY_LENGTH)
def scale_kernel(
    dy, saved,  # (M, N)
    x, w, h, b,  # (M, K), (N, K), (M, R), (N, R)
    m, c,  # (N,)
    dz, beside,  # (M, N)
    partial_m, partial_bias, partial_B,  # (strips, N) twice, (strips, N, R)
    dm, dc, dbias, dB,  # (N,) three times, (N, R)
    M, N, K, R, ROWS, tiny, lead, gain,
    stride_dy, stride_saved, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    BLOCK_R: tl.constexpr, SAVED_PRE_SCALE: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr,
):
    """dz, (lead + gain (g - 1)) dy beside it, and the sums of each strip of ROWS tokens; of a SINGLE one what comes of them."""
    if PDL:
        gdc_launch_dependents()
    n, strip = strip_at(N, BLOCK_N, FLAT)
    dy, h = Matrix(dy, stride_dy, None), Matrix(h, stride_hm, stride_hr)
    g, g_beside = None, None
    if dz is not None or beside is not None or BLOCK_R > 0:
        g = g_tile(m, c, n, N)[None, :]
        if beside is not None:
            g_beside = lead + gain * (g - 1)
    kept = Matrix(None if dm is None and dc is None else saved, stride_saved, None)
    sums = scaled(
        dy, kept, h, dz, beside, g, g_beside, n, strip * ROWS, 0, tl.minimum(ROWS, M - strip * ROWS), M, N, R,
        dbias is not None, BLOCK_R, BLOCK_M, STAGES,
    )
    if SINGLE:
        _finish(
            sums[0], sums[1], dy, Matrix(x, stride_xm, stride_xk), Matrix(w, stride_wn, stride_wk), h,
            Matrix(b, stride_bn, stride_br), m, c, (dm, dc, dbias), n, N, M, K, R, tiny, SAVED_PRE_SCALE,
        )
        if BLOCK_R > 0:
            r = tl.arange(0, BLOCK_R)
            tl.store(dB + n[:, None] * R + r[None, :], sums[2].to(dB.dtype.element_ty), mask=within(n, r, N, R))
    else:
        store_sums(sums, partial_m, partial_bias, partial_B, strip, n, N, R)


@kernel("partial_m partial_bias partial_B dB", **ANY_LENGTH)
def finish_kernel(
    dy, x, w, h, b,  # (M, N), (M, K), (N, K), (M, R), (N, R)
    m, c,  # (N,)
    partial_m, partial_bias, partial_B,  # (strips, N) twice, (strips, N, R)
    dm, dc, dbias, dB,  # (N,) three times, (N, R)
    M, N, K, R, strips, tiny,
    stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    BLOCK_R: tl.constexpr, SAVED_PRE_SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):
    """The gradients from the sums of the strips, in their order."""
    if PDL:
        gdc_wait()
    n = block_on(0, BLOCK_N)
    sum_m = zeros(BLOCK_N)
    sum_bias = zeros(BLOCK_N)
    if partial_m is not None:
        sum_m = column_sums(partial_m, n, N, N, strips, BLOCK_T)
    if partial_bias is not None:
        sum_bias = column_sums(partial_bias, n, N, N, strips, BLOCK_T)
    _finish(
        sum_m, sum_bias, Matrix(dy, stride_dy, None), Matrix(x, stride_xm, stride_xk), Matrix(w, stride_wn, stride_wk),
        Matrix(h, stride_hm, stride_hr), Matrix(b, stride_bn, stride_br), m, c, (dm, dc, dbias), n, N, M, K, R, tiny,
        SAVED_PRE_SCALE,
    )
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        sum_B = zeros(BLOCK_N, BLOCK_R)
        at_strip = addresses(Matrix(partial_B, R, None), n, r)
        for _ in range(strips):
            sum_B += tl.load(at_strip, mask=within(n, r, N, R), other=0.0)
            at_strip += N * R
        store(sum_B, Matrix(dB, R, None), n, r, N, R)


@triton.jit
def _factor(
    wide, narrow, out, m, norm, first, M, C, R, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr
):
    """sum_t wide_tc narrow_tr for the columns c that begin at ``first``; times their g, where m is there."""
    c, r = first + tl.arange(0, BLOCK_C), block_on(1, BLOCK_R)
    acc = over_tokens(wide, narrow, c, r, 0, M, C, R, BLOCK_M)
    if m is not None:
        acc *= g_tile(m, norm, c, C)[:, None]
    store(acc, out, c, r, C, R)


@kernel("x dh dA dz h dB", "R K M x, R N M x", **ANY_LENGTH)
def factors_kernel(
    x, dh, dA, dz, h, dB, m, c, M, K, N, R, stride_x, stride_dh, stride_dz, stride_h,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Where m is there, dz is dy, and dB takes g."""
    tile, tiles_x = tl.program_id(0), tl.cdiv(K, BLOCK_C)
    x, dh = Matrix(x, stride_x, None), Matrix(dh, stride_dh, None)
    dz, h = Matrix(dz, stride_dz, None), Matrix(h, stride_h, None)
    if tile < tiles_x:
        _factor(x, dh, Matrix(dA, 1, K), None, None, tile * BLOCK_C, M, K, R, BLOCK_C, BLOCK_R, BLOCK_M)
    else:
        _factor(dz, h, Matrix(dB, R, 1), m, c, (tile - tiles_x) * BLOCK_C, M, N, R, BLOCK_C, BLOCK_R, BLOCK_M)
