"""Backward's elementwise pass and the sums over tokens; see fdora/triton/scale.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import EPS, g_tile
from fdora.triton.kernels.tile import column_at, row_at
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def over_tokens(dy, x, n, k, N, M, K, stride_dy, stride_xm, stride_xk):
    """dy^T x at the columns n of dy and k of x."""
    t = tl.arange(0, 32)
    v = tl.zeros((n.shape[0], k.shape[0]), tl.float32)
    for t0 in range(0, M, 32):
        row = (t0 + t).to(tl.int64)
        d = tl.load(dy + row[:, None] * stride_dy + n[None, :], mask=(row < M)[:, None] & (n < N)[None, :], other=0.0)
        at = x + row[:, None] * stride_xm + k[None, :].to(tl.int64) * stride_xk
        v = tl.dot(tl.trans(d), tl.load(at, mask=(row < M)[:, None] & (k < K)[None, :], other=0.0), v)
    return v


@triton.jit
def dot_rows(dy, x, w, n, N, M, K, stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, BLOCK_N: tl.constexpr):
    """sum_k (dy^T x)_nk w_nk for the columns n of dy."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k0 in range(0, K, 32):
        k = k0 + tl.arange(0, 32)
        v = over_tokens(dy, x, n, k, N, M, K, stride_dy, stride_xm, stride_xk)
        at = w + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
        total += tl.sum(v * tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32), axis=1)
    return total


@triton.jit
def store_gradients(dg, g, c, dm, dc, n, mask, N, NEED_M: tl.constexpr, NEED_C: tl.constexpr):
    """dm = dg / c and dc = -dm g."""
    cn = tl.load(c + n, mask=n < N, other=1.0)
    out = dg / tl.where(cn < EPS, EPS, cn)
    if NEED_M:
        tl.store(dm + n, out.to(dm.dtype.element_ty), mask=mask)
    if NEED_C:
        tl.store(dc + n, tl.where(cn > EPS, -out * g, 0.0), mask=mask)


@triton.jit
def _finish(
    sum_m, sum_bias, dy, x, w, h, b, m, c, dm, dc, dbias, n, N, M, K, R, tiny,
    stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    NEED_M: tl.constexpr, NEED_C: tl.constexpr, NEED_BIAS: tl.constexpr, SAVED_PRE_SCALE: tl.constexpr, REDO: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From the sums over all tokens to the gradients of m, c and bias for the columns n. REDO: w is there for the lost ones."""
    if NEED_M or NEED_C:
        g = g_tile(m, c, n, N)
        dg = sum_m
        if not SAVED_PRE_SCALE:
            lost = (tl.abs(g) < tiny) & (n < N)
            dg = sum_m / tl.where(lost, 1.0, g)
            # float32 always keeps pre_scale (linear.py), so the products here are of half precision.
            if REDO and tl.max(lost.to(tl.int32), axis=0) > 0:
                exact = dot_rows(dy, x, w, n, N, M, K, stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, BLOCK_N)
                exact += dot_rows(dy, h, b, n, N, M, R, stride_dy, stride_hm, stride_hr, stride_bn, stride_br, BLOCK_N)
                dg = tl.where(lost, exact, dg)
        store_gradients(dg, g, c, dm, dc, n, n < N, N, NEED_M, NEED_C)
    if NEED_BIAS:
        tl.store(dbias + n, sum_bias, mask=n < N)


@triton.jit(launch_metadata=launched)
def scale_kernel(
    dy, saved, x, w, h, b, m, c, dz, dz_minus_dy, partial_m, partial_bias, partial_B, dm, dc, dbias, dB,
    M, N, K, R, ROWS, tiny,
    stride_dy, stride_saved, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    NEED_DZ: tl.constexpr, NEED_DZ_MINUS_DY: tl.constexpr, NEED_M: tl.constexpr, NEED_C: tl.constexpr, NEED_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, SAVED_PRE_SCALE: tl.constexpr, REDO: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr,
):
    """Everything is loaded before anything is stored: no load is moved ahead of a store. Sums stay one to an element of the
    tile until the end: their reduction asks the warps to meet."""
    if PDL:
        gdc_launch_dependents()
    n = column_at(tl.cdiv(N, BLOCK_N), FLAT) * BLOCK_N + tl.arange(0, BLOCK_N)
    strip = row_at(tl.cdiv(N, BLOCK_N), FLAT)
    in_n = n < N
    if NEED_DZ or NEED_DZ_MINUS_DY or BLOCK_R > 0:
        g = g_tile(m, c, n, N)[None, :]
    all_m = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    all_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        sum_B = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for i in tl.range(0, tl.minimum(ROWS, M - strip * ROWS), BLOCK_M, num_stages=STAGES):
        t = strip * ROWS + i + tl.arange(0, BLOCK_M)
        mask = (t < M)[:, None] & in_n[None, :]
        row = t[:, None].to(tl.int64)
        d = tl.load(dy + row * stride_dy + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_M or NEED_C:
            v = tl.load(saved + row * stride_saved + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if BLOCK_R > 0:
            at = h + row * stride_hm + r[None, :] * stride_hr
            ht = tl.load(at, mask=(t < M)[:, None] & (r < R)[None, :], other=0.0)
        if NEED_DZ or BLOCK_R > 0:
            z = (d * g).to(dy.dtype.element_ty)
        if NEED_DZ:
            tl.store(dz + row * N + n[None, :], z, mask=mask)
        if NEED_DZ_MINUS_DY:
            tl.store(dz_minus_dy + row * N + n[None, :], (d * (g - 1)).to(dz_minus_dy.dtype.element_ty), mask=mask)
        if NEED_M or NEED_C:
            all_m += d * v
        if NEED_BIAS:
            all_bias += d
        if BLOCK_R > 0:
            sum_B = tl.dot(tl.trans(z), ht, sum_B)
    sum_m, sum_bias = tl.sum(all_m, axis=0), tl.sum(all_bias, axis=0)
    at_n = strip.to(tl.int64) * N + n
    if SINGLE:
        _finish(sum_m, sum_bias, dy, x, w, h, b, m, c, dm, dc, dbias, n, N, M, K, R, tiny, stride_dy, stride_xm, stride_xk,
                stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br, NEED_M, NEED_C, NEED_BIAS, SAVED_PRE_SCALE,
                REDO, BLOCK_N)
    else:
        if NEED_M or NEED_C:
            tl.store(partial_m + strip.to(tl.int64) * N + n, sum_m, mask=in_n)  # not at_n: other machine code
        if NEED_BIAS:
            tl.store(partial_bias + at_n, sum_bias, mask=in_n)
    if BLOCK_R > 0:
        mask = in_n[:, None] & (r < R)[None, :]
        if SINGLE:
            tl.store(dB + n[:, None] * R + r[None, :], sum_B.to(dB.dtype.element_ty), mask=mask)
        else:
            tl.store(partial_B + at_n[:, None] * R + r[None, :], sum_B, mask=mask)


@triton.jit
def _column_sums(partial, n, N, strips, t):
    total = tl.zeros((n.shape[0],), tl.float32)
    for t0 in range(0, strips, t.shape[0]):
        mask = (t0 + t < strips)[:, None] & (n < N)[None, :]
        total += tl.sum(tl.load(partial + (t0 + t)[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0), axis=0)
    return total


@triton.jit(launch_metadata=launched)
def finish_kernel(
    dy, x, w, h, b, m, c, partial_m, partial_bias, partial_B, dm, dc, dbias, dB, M, N, K, R, strips, tiny,
    stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    NEED_M: tl.constexpr, NEED_C: tl.constexpr, NEED_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, SAVED_PRE_SCALE: tl.constexpr,
    REDO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_m = tl.zeros((BLOCK_N,), tl.float32)
    sum_bias = tl.zeros((BLOCK_N,), tl.float32)
    t = tl.arange(0, BLOCK_T)
    if NEED_M or NEED_C:
        sum_m = _column_sums(partial_m, n, N, strips, t)
    if NEED_BIAS:
        sum_bias = _column_sums(partial_bias, n, N, strips, t)
    _finish(sum_m, sum_bias, dy, x, w, h, b, m, c, dm, dc, dbias, n, N, M, K, R, tiny, stride_dy, stride_xm, stride_xk,
            stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br, NEED_M, NEED_C, NEED_BIAS, SAVED_PRE_SCALE,
            REDO, BLOCK_N)
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        at = n[:, None].to(tl.int64) * R + r[None, :]
        mask = (n < N)[:, None] & (r < R)[None, :]
        sum_B = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        at_strip = partial_B + at
        for _ in range(strips):
            sum_B += tl.load(at_strip, mask=mask, other=0.0)
            at_strip += N * R
        tl.store(dB + at, sum_B.to(dB.dtype.element_ty), mask=mask)
