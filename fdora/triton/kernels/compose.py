"""``y = h base + g s lora + bias``, h = g or g - 1; formulas in fdora/eager/compose.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import column_at, row_at
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def compose_fwd_kernel(
    base, lora, g, bias, y, s, M, N, stride_base, stride_lora, stride_y,
    DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    row = m[:, None].to(tl.int64)
    u = tl.load(base + row * stride_base + n[None, :], mask=mask).to(tl.float32)
    v = s * tl.load(lora + row * stride_lora + n[None, :], mask=mask).to(tl.float32)
    gn = tl.load(g + n, mask=n < N)[None, :]
    out = (gn - 1) * u + gn * v if DELTA else gn * (u + v)
    if HAS_BIAS:
        out += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
    tl.store(y + row * stride_y + n[None, :], out.to(y.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def compose_bwd_kernel(
    dy, base, lora, g, dbase, dlora, partial_g, partial_bias, s, M, N, stride_dy, stride_base, stride_lora,
    DELTA: tl.constexpr, NEED_BASE: tl.constexpr, NEED_LORA: tl.constexpr, NEED_G: tl.constexpr, NEED_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr,
):
    n = column_at(tl.cdiv(N, BLOCK_N), FLAT) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    gn = tl.load(g + n, mask=in_n, other=0.0)[None, :]
    sum_g = tl.zeros((BLOCK_N,), tl.float32)
    sum_bias = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(0, ROWS, BLOCK_M):
        m = row_at(tl.cdiv(N, BLOCK_N), FLAT) * ROWS + i + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & in_n[None, :]
        row = m[:, None].to(tl.int64)
        d = tl.load(dy + row * stride_dy + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_BASE:
            tl.store(dbase + row * N + n[None, :], (d * (gn - 1 if DELTA else gn)).to(dbase.dtype.element_ty), mask=mask)
        if NEED_LORA:
            tl.store(dlora + row * N + n[None, :], (d * (s * gn)).to(dlora.dtype.element_ty), mask=mask)
        if NEED_G:
            u = tl.load(base + row * stride_base + n[None, :], mask=mask, other=0.0).to(tl.float32)
            v = tl.load(lora + row * stride_lora + n[None, :], mask=mask, other=0.0).to(tl.float32)
            sum_g += tl.sum(d * (u + s * v), axis=0)
        if NEED_BIAS:
            sum_bias += tl.sum(d, axis=0)
    at = row_at(tl.cdiv(N, BLOCK_N), FLAT).to(tl.int64) * N + n
    if NEED_G:
        tl.store(partial_g + at, sum_g, mask=in_n)
    if NEED_BIAS:
        tl.store(partial_bias + at, sum_bias, mask=in_n)


@triton.jit(launch_metadata=launched)
def planes_fwd_kernel(
    base, lora, g, bias, y, s, rows, N, P,
    DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, FLAT: tl.constexpr,
):
    """The same where row l N + n, of P points, is channel n."""
    m = column_at(tl.cdiv(rows, BLOCK_M), FLAT) * BLOCK_M + tl.arange(0, BLOCK_M)
    p = row_at(tl.cdiv(rows, BLOCK_M), FLAT) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = (m < rows)[:, None] & (p < P)[None, :]
    at = m[:, None].to(tl.int64) * P + p[None, :]
    u = tl.load(base + at, mask=mask).to(tl.float32)
    v = s * tl.load(lora + at, mask=mask).to(tl.float32)
    gn = tl.load(g + m % N)[:, None]
    out = (gn - 1) * u + gn * v if DELTA else gn * (u + v)
    if HAS_BIAS:
        out += tl.load(bias + m % N).to(tl.float32)[:, None]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def planes_bwd_kernel(
    dy, base, lora, g, dbase, dlora, partial_g, partial_bias, s, rows, N, P,
    DELTA: tl.constexpr, NEED_BASE: tl.constexpr, NEED_LORA: tl.constexpr, NEED_G: tl.constexpr, NEED_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, STRIP: tl.constexpr, FLAT: tl.constexpr,
):
    m = column_at(tl.cdiv(rows, BLOCK_M), FLAT) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < rows
    gn = tl.load(g + m % N)[:, None]
    sum_g = tl.zeros((BLOCK_M,), tl.float32)
    sum_bias = tl.zeros((BLOCK_M,), tl.float32)
    for i in range(0, STRIP, BLOCK_P):
        p = row_at(tl.cdiv(rows, BLOCK_M), FLAT) * STRIP + i + tl.arange(0, BLOCK_P)
        mask = in_m[:, None] & (p < P)[None, :]
        at = m[:, None].to(tl.int64) * P + p[None, :]
        d = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if NEED_BASE:
            tl.store(dbase + at, (d * (gn - 1 if DELTA else gn)).to(dbase.dtype.element_ty), mask=mask)
        if NEED_LORA:
            tl.store(dlora + at, (d * (s * gn)).to(dlora.dtype.element_ty), mask=mask)
        if NEED_G:
            u = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
            v = tl.load(lora + at, mask=mask, other=0.0).to(tl.float32)
            sum_g += tl.sum(d * (u + s * v), axis=1)
        if NEED_BIAS:
            sum_bias += tl.sum(d, axis=1)
    strips = tl.cdiv(P, STRIP) if FLAT else tl.num_programs(1)
    to = ((m // N).to(tl.int64) * strips + row_at(tl.cdiv(rows, BLOCK_M), FLAT)) * N + m % N
    if NEED_G:
        tl.store(partial_g + to, sum_g, mask=in_m)
    if NEED_BIAS:
        tl.store(partial_bias + to, sum_bias, mask=in_m)
