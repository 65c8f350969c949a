"""``y = h base + g s lora + bias``, h = g or g - 1; formulas in fdora/eager/compose.py.

Channels lie along axis 1 of rows of tokens, and along axis 0 of planes, where row l N + n, of P points, is channel n.
Forward has a kernel for each: one body for both took more registers for planes on sm_80.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import times_g
from fdora.triton.kernels.tile import Matrix, addresses, block_on, loaded, store, strip_at, vector, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_wait


@triton.jit
def _backward(
    dy, base, lora, dbase, dlora, partial_g, partial_bias, gn, own, strip, I, J, s,
    DELTA: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr, AXIS: tl.constexpr,
):
    """Gradients of the channels ``own`` along a strip of the other axis, and their sums of dy (base + s lora) and of dy."""
    sum_g = tl.zeros(own.shape, tl.float32)
    sum_bias = tl.zeros(own.shape, tl.float32)
    gn = tl.expand_dims(gn, 1 - AXIS)
    for at in range(0, STRIP, STEP):
        along = strip * STRIP + at + tl.arange(0, STEP)
        i, j = (along, own) if AXIS == 1 else (own, along)
        d = loaded(dy, i, j, I, J).to(tl.float32)
        if dbase.p is not None:
            store(times_g(d, gn - 1 if DELTA else gn, dbase.p.dtype.element_ty), dbase, i, j, I, J)
        if dlora.p is not None:
            store(times_g(d, s * gn, dlora.p.dtype.element_ty), dlora, i, j, I, J)
        if partial_g is not None:
            u, v = loaded(base, i, j, I, J).to(tl.float32), loaded(lora, i, j, I, J).to(tl.float32)
            sum_g += tl.sum(d * (u + s * v), axis=1 - AXIS)
        if partial_bias is not None:
            sum_bias += tl.sum(d, axis=1 - AXIS)
    return sum_g, sum_bias


@triton.jit
def _store_sums(sums, partial_g, partial_bias, at, mask):
    if partial_g is not None:
        tl.store(partial_g + at, sums[0], mask=mask)
    if partial_bias is not None:
        tl.store(partial_bias + at, sums[1], mask=mask)


@kernel("base lora y")
def compose_fwd_kernel(
    base, lora, g, bias, y, s, M, N, stride_base, stride_lora, stride_y,
    DELTA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    m, n = block_on(0, BLOCK_M), block_on(1, BLOCK_N)
    mask = within(m, n, M, N)
    u = tl.load(addresses(Matrix(base, stride_base, None), m, n), mask=mask).to(tl.float32)
    v = s * tl.load(addresses(Matrix(lora, stride_lora, None), m, n), mask=mask).to(tl.float32)
    gn = tl.load(g + n, mask=n < N)[None, :]
    out = (gn - 1) * u + gn * v if DELTA else gn * (u + v)
    if bias is not None:
        out += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
    store(out, Matrix(y, stride_y, None), m, n, M, N)


@kernel("dy base?partial_g lora?partial_g dbase dlora partial_g partial_bias")
def compose_bwd_kernel(
    dy, base, lora,  # (M, N)
    g,  # (N,)
    dbase, dlora,  # (M, N)
    partial_g, partial_bias,  # (strips, N)
    s, M, N, stride_dy, stride_base, stride_lora,
    DELTA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr,
):
    n, strip = strip_at(N, BLOCK_N, FLAT)
    gn = vector(g, n, N)
    dy, base, lora = Matrix(dy, stride_dy, None), Matrix(base, stride_base, None), Matrix(lora, stride_lora, None)
    sums = _backward(
        dy, base, lora, Matrix(dbase, N, None), Matrix(dlora, N, None), partial_g, partial_bias, gn, n, strip, M, N, s,
        DELTA, ROWS, BLOCK_M, 1,
    )
    _store_sums(sums, partial_g, partial_bias, strip.to(tl.int64) * N + n, n < N)


@kernel("base lora y")
def planes_fwd_kernel(
    base, lora, g, bias, y, s, rows, N, P,
    DELTA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, FLAT: tl.constexpr,
):
    """The same where row l N + n, of P points, is channel n."""
    m, block = strip_at(rows, BLOCK_M, FLAT)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = within(m, p, rows, P)
    at = m[:, None].to(tl.int64) * P + p[None, :]
    u = tl.load(base + at, mask=mask).to(tl.float32)
    v = s * tl.load(lora + at, mask=mask).to(tl.float32)
    gn = tl.load(g + m % N)[:, None]
    out = (gn - 1) * u + gn * v if DELTA else gn * (u + v)
    if bias is not None:
        out += tl.load(bias + m % N).to(tl.float32)[:, None]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@kernel("dy base?partial_g lora?partial_g dbase dlora partial_g partial_bias")
def planes_bwd_kernel(
    dy, base, lora,  # (rows, P)
    g,  # (N,)
    dbase, dlora,  # (rows, P)
    partial_g, partial_bias,  # (rows / N strips, N)
    s, rows, N, P,
    DELTA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, STRIP: tl.constexpr, FLAT: tl.constexpr,
):
    m, strip = strip_at(rows, BLOCK_M, FLAT)
    gn = tl.load(g + m % N)
    sums = _backward(
        Matrix(dy, P, None), Matrix(base, P, None), Matrix(lora, P, None), Matrix(dbase, P, None), Matrix(dlora, P, None),
        partial_g, partial_bias, gn, m, strip, rows, P, s, DELTA, STRIP, BLOCK_P, 0,
    )
    strips = tl.cdiv(P, STRIP) if FLAT else tl.num_programs(1)
    at = ((m // N).to(tl.int64) * strips + strip) * N + m % N
    _store_sums(sums, partial_g, partial_bias, at, m < rows)


@kernel("z z h b", "M N R b")
def slots_kernel(
    z, g, holds, bias,  # (M, N), (S, N), (S,), (N,)
    order, counts, starts, ids,  # (M,) and more, then as many as there are segments
    h, b, ends,  # (P, M, R), (S, N, R), (P + 1,) in sixteens: the compiler must know it
    M, N, SEGMENTS, stride_z,
    PDL: tl.constexpr, R: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """In place; a program has tokens of one slot, and columns of one part. Its sum runs along the rank as that of vLLM's own
    kernel does: tokens of LoRA get the same bits. z is loaded last: earlier its registers cost up to a tenth of the time."""
    i, s, part = tl.program_id(0), tl.arange(0, BLOCK_S), tl.program_id(2)
    if PDL:
        gdc_wait()
    used = vector(ids, s, SEGMENTS, -1) >= 0
    tiles = tl.cdiv(tl.load(counts + s, mask=used, other=0), BLOCK_M)
    behind = tl.cumsum(tiles, 0)
    at = tl.sum((behind <= i).to(tl.int32), axis=0)
    first, end = tl.load(ends + part) * 16 + tl.program_id(1) * BLOCK_N, tl.load(ends + part + 1) * 16
    if (at < SEGMENTS) & (first < end):
        slot = tl.load(ids + at).to(tl.int64)
        row = (i - tl.sum(tl.where(s == at, behind - tiles, 0), axis=0)) * BLOCK_M + tl.arange(0, BLOCK_M)
        m = vector(order + tl.load(starts + at), row, tl.load(counts + at), M)
        n = first + tl.arange(0, BLOCK_N)
        own_h, own_b, to = Matrix(h + part * M * R, R, None), Matrix(b + slot * N * R, 1, R), Matrix(z, stride_z, None)
        gn = vector(g + slot * N, n, tl.where(tl.load(holds + slot) != 0, end, 0), 1.0)
        acc = zeros(BLOCK_M, BLOCK_N)
        for r0 in range(0, R, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            bt = loaded(own_b, r, n, R, end)
            acc = tl.dot(loaded(own_h, m, r, M, R).to(bt.dtype), bt, acc)
        zt, c = loaded(to, m, n, M, end), tl.zeros_like(gn)
        if bias is not None:
            c = vector(bias, n, end).to(tl.float32)
        scaled = (gn * (zt.to(tl.float32) + acc - c) + c).to(zt.dtype)
        store(tl.where((gn == 1)[None, :], zt + acc.to(zt.dtype), scaled), to, m, n, M, end)
