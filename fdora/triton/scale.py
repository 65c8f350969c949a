"""Backward's elementwise pass: ``dz = g dy`` beside the sums over tokens for m, c and bias, and dB where r is small.

    dz = g dy       dg_n = sum_t dy inner       dm = dg / c       dc = -dm g       dbias = sum_t dy       dB = dz^T h

A program walks down ROWS rows of its columns; with more than one strip of rows the sums go through partials that a second
kernel adds in a fixed order. inner = base + s lora is read back as y / g where the output was kept. A row of W with g at or
near 0 left nothing of inner in y: for those columns, and only there, the products are formed again from x and h,
dg_n = (dy_n^T x) . W_n + (dy_n^T h) . B_n. That is a branch on the device; the host never looks.

Bytes: dy and y read, dz written, 3 M N; the products dy^T h ride along on the tiles (h holds s x A^T).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import capability, cdiv, launch
from fdora.triton._repeat import repeatable
from fdora.triton.configs import ScaleConfig, scale_config

_config = lru_cache(4096)(scale_config)

EPS = tl.constexpr(1e-12)  # as in fdora.eager.norm
FINISH_N, FINISH_T = 32, 32


@triton.jit
def scale_tile(m, c, n, N):
    """g of the columns n, in float32. A NaN in c stays one."""
    cn = tl.load(c + n, mask=n < N, other=1.0)
    return tl.div_rn(tl.load(m + n, mask=n < N, other=0.0).to(tl.float32), tl.where(cn < EPS, EPS, cn))


@triton.jit
def _dot_rows(dy, x, w, n, N, M, K, stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, BLOCK_N: tl.constexpr
):  # fmt: skip
    """sum_k (dy^T x)_nk w_nk for the columns n of dy."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    t = tl.arange(0, 32)
    for k0 in range(0, K, 32):
        k = k0 + tl.arange(0, 32)
        v = tl.zeros((BLOCK_N, 32), tl.float32)
        for t0 in range(0, M, 32):
            row = (t0 + t).to(tl.int64)
            d = tl.load(dy + row[:, None] * stride_dy + n[None, :], mask=(row < M)[:, None] & (n < N)[None, :], other=0.0)
            at = x + row[:, None] * stride_xm + k[None, :].to(tl.int64) * stride_xk
            v = tl.dot(tl.trans(d), tl.load(at, mask=(row < M)[:, None] & (k < K)[None, :], other=0.0), v)
        at = w + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
        total += tl.sum(v * tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32), axis=1)
    return total


@triton.jit
def _finish(
    sum_m, sum_bias, dy, x, w, h, b, m, c, dm, dc, dbias, n, N, M, K, R, tiny,
    stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    NEED_M: tl.constexpr, NEED_C: tl.constexpr, NEED_BIAS: tl.constexpr, KEPT_INNER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From the sums over all tokens to the gradients of m, c and bias for the columns n."""
    if NEED_M or NEED_C:
        g = scale_tile(m, c, n, N)
        dg = sum_m
        if not KEPT_INNER:
            lost = (tl.abs(g) < tiny) & (n < N)
            dg = sum_m / tl.where(lost, 1.0, g)
            # float32 always keeps inner (linear.py), so the products here are of half precision.
            if tl.max(lost.to(tl.int32), axis=0) > 0:
                exact = _dot_rows(dy, x, w, n, N, M, K, stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, BLOCK_N)
                exact += _dot_rows(dy, h, b, n, N, M, R, stride_dy, stride_hm, stride_hr, stride_bn, stride_br, BLOCK_N)
                dg = tl.where(lost, exact, dg)
        cn = tl.load(c + n, mask=n < N, other=1.0)
        out = dg / tl.where(cn < EPS, EPS, cn)
        if NEED_M:
            tl.store(dm + n, out.to(dm.dtype.element_ty), mask=n < N)
        if NEED_C:
            tl.store(dc + n, tl.where(cn > EPS, -out * g, 0.0), mask=n < N)
    if NEED_BIAS:
        tl.store(dbias + n, sum_bias, mask=n < N)


@triton.jit
def _scale_kernel(
    dy, kept, x, w, h, b, m, c, dz, dz_less, partial_m, partial_bias, partial_B, dm, dc, dbias, dB, M, N, K, R, tiny,
    stride_dy, stride_kept, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    NEED_DZ: tl.constexpr, NEED_LESS: tl.constexpr, NEED_M: tl.constexpr, NEED_C: tl.constexpr, NEED_BIAS: tl.constexpr,
    RANK: tl.constexpr, KEPT_INNER: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    strip = tl.program_id(1)
    in_n = n < N
    g = scale_tile(m, c, n, N)[None, :]
    sum_m = tl.zeros((BLOCK_N,), tl.float32)
    sum_bias = tl.zeros((BLOCK_N,), tl.float32)
    if RANK > 0:
        r = tl.arange(0, RANK)
        sum_B = tl.zeros((BLOCK_N, RANK), tl.float32)
    for i in range(0, ROWS, BLOCK_M):
        t = strip * ROWS + i + tl.arange(0, BLOCK_M)
        mask = (t < M)[:, None] & in_n[None, :]
        row = t[:, None].to(tl.int64)
        d = tl.load(dy + row * stride_dy + n[None, :], mask=mask, other=0.0).to(tl.float32)
        z = (d * g).to(dy.dtype.element_ty)
        if NEED_DZ:
            tl.store(dz + row * N + n[None, :], z, mask=mask)
        if NEED_LESS:
            tl.store(dz_less + row * N + n[None, :], (d * (g - 1)).to(dz_less.dtype.element_ty), mask=mask)
        if NEED_M or NEED_C:
            v = tl.load(kept + row * stride_kept + n[None, :], mask=mask, other=0.0).to(tl.float32)
            sum_m += tl.sum(d * v, axis=0)
        if NEED_BIAS:
            sum_bias += tl.sum(d, axis=0)
        if RANK > 0:
            at = h + row * stride_hm + r[None, :] * stride_hr
            ht = tl.load(at, mask=(t < M)[:, None] & (r < R)[None, :], other=0.0)
            sum_B = tl.dot(tl.trans(z), ht, sum_B)
    at_n = strip.to(tl.int64) * N + n
    if SINGLE:
        _finish(sum_m, sum_bias, dy, x, w, h, b, m, c, dm, dc, dbias, n, N, M, K, R, tiny, stride_dy, stride_xm, stride_xk,
                stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br, NEED_M, NEED_C, NEED_BIAS, KEPT_INNER,
                BLOCK_N)  # fmt: skip
    else:
        if NEED_M or NEED_C:
            tl.store(partial_m + at_n, sum_m, mask=in_n)
        if NEED_BIAS:
            tl.store(partial_bias + at_n, sum_bias, mask=in_n)
    if RANK > 0:
        mask = in_n[:, None] & (r < R)[None, :]
        if SINGLE:
            tl.store(dB + n[:, None] * R + r[None, :], sum_B.to(dB.dtype.element_ty), mask=mask)
        else:
            tl.store(partial_B + at_n[:, None] * R + r[None, :], sum_B, mask=mask)


@triton.jit
def _finish_kernel(
    dy, x, w, h, b, m, c, partial_m, partial_bias, partial_B, dm, dc, dbias, dB, M, N, K, R, strips, tiny,
    stride_dy, stride_xm, stride_xk, stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br,
    NEED_M: tl.constexpr, NEED_C: tl.constexpr, NEED_BIAS: tl.constexpr, RANK: tl.constexpr, KEPT_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_m = tl.zeros((BLOCK_N,), tl.float32)
    sum_bias = tl.zeros((BLOCK_N,), tl.float32)
    t = tl.arange(0, BLOCK_T)
    for t0 in range(0, strips, BLOCK_T):
        at = (t0 + t)[:, None].to(tl.int64) * N + n[None, :]
        mask = (t0 + t < strips)[:, None] & (n < N)[None, :]
        if NEED_M or NEED_C:
            sum_m += tl.sum(tl.load(partial_m + at, mask=mask, other=0.0), axis=0)
        if NEED_BIAS:
            sum_bias += tl.sum(tl.load(partial_bias + at, mask=mask, other=0.0), axis=0)
    _finish(sum_m, sum_bias, dy, x, w, h, b, m, c, dm, dc, dbias, n, N, M, K, R, tiny, stride_dy, stride_xm, stride_xk,
            stride_wn, stride_wk, stride_hm, stride_hr, stride_bn, stride_br, NEED_M, NEED_C, NEED_BIAS, KEPT_INNER,
            BLOCK_N)  # fmt: skip
    if RANK > 0:
        r = tl.arange(0, RANK)
        at = n[:, None].to(tl.int64) * R + r[None, :]
        mask = (n < N)[:, None] & (r < R)[None, :]
        sum_B = tl.zeros((BLOCK_N, RANK), tl.float32)
        at_strip = partial_B + at
        for _ in range(strips):
            sum_B += tl.load(at_strip, mask=mask, other=0.0)
            at_strip += N * R
        tl.store(dB + at, sum_B.to(dB.dtype.element_ty), mask=mask)


class Sums(NamedTuple):
    """What one pass over dy gives; None where it was not asked for."""

    dz: Tensor | None
    dz_less: Tensor | None
    dm: Tensor | None
    dc: Tensor | None
    dbias: Tensor | None
    dB: Tensor | None


@repeatable
def scale_backward(
    dy: Tensor, kept: Tensor | None, x: Tensor, W: Tensor, h: Tensor, B: Tensor, m: Tensor, c: Tensor, kept_inner: bool,
    need_dz: bool, need_less: bool, need_m: bool, need_c: bool, need_bias: bool, need_B: bool,
    config: ScaleConfig | None = None,
) -> Sums:  # fmt: skip
    """dy, kept (M, N) with adjacent columns. h is s x A^T. dB comes back only where r is small enough to ride along;
    where it does not, dz comes back for it."""
    (M, N), K, r = dy.shape, W.shape[1], h.shape[1]
    config = config or _config(M, N, r, dy.dtype != torch.float32, capability(dy.device))
    rank = config.rank if need_B else 0
    need_dz = need_dz or (need_B and not rank)
    strips = cdiv(M, config.ROWS)
    needs_m = need_m or need_c

    def new(need: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(shape, device=dy.device, dtype=dtype) if need else None

    out = Sums(
        new(need_dz, M, N, dtype=dy.dtype), new(need_less, M, N, dtype=dy.dtype), new(need_m, N, dtype=m.dtype),
        new(need_c, N), new(need_bias, N), new(rank > 0, N, r, dtype=B.dtype),
    )  # fmt: skip
    if M == 0 or N == 0:
        for t in (out.dm, out.dc, out.dbias, out.dB):
            if t is not None:
                t.zero_()
        return out
    single = strips == 1
    partial_m, partial_bias = new(not single and needs_m, strips, N), new(not single and need_bias, strips, N)
    partial_B = new(not single and rank > 0, strips, N, r)
    info = torch.finfo(dy.dtype)
    operands, results = (x, W, h, B, m, c), (out.dm, out.dc, out.dbias, out.dB)
    strides = (*x.stride(), *W.stride(), *h.stride(), *B.stride())
    tiny = info.tiny / info.eps  # below it y = g inner is subnormal where inner is not small
    launch(
        _scale_kernel, (cdiv(N, config.BLOCK_N), strips),
        (dy, kept, *operands, out.dz, out.dz_less, partial_m, partial_bias, partial_B, *results, M, N, K, r, tiny,
         dy.stride(0), 0 if kept is None else kept.stride(0), *strides),
        (need_dz, need_less, need_m, need_c, need_bias, rank, kept_inner, single, config.BLOCK_M, config.BLOCK_N, config.ROWS),
        config.num_warps,
    )  # fmt: skip
    if not single and (needs_m or need_bias or rank):
        launch(
            _finish_kernel, (cdiv(N, FINISH_N),),
            (dy, *operands, partial_m, partial_bias, partial_B, *results, M, N, K, r, strips, tiny, dy.stride(0), *strides),
            (need_m, need_c, need_bias, rank, kept_inner, FINISH_N, FINISH_T), 4,
        )  # fmt: skip
    return out
