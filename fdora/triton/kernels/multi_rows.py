"""Copies for many adapters: tokens into sorted order and back, a bank as one matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import bounds_of, keep_by_segments, place_of, scale_of
from fdora.triton.kernels.tile import Matrix, addresses, block_on, both, store, vector, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_wait


@kernel("gates out out")
def rows_kernel(
    x, order, gates, out, M, N, k, stride_x, SCATTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out[t] = gates[order[t]] x[order[t] // k]; SCATTER: out[order[t]] = x[t]."""
    t, n = block_on(0, BLOCK_M), block_on(1, BLOCK_N)
    mask, there = within(t, n, M, N), vector(order, t, M)
    of_x, of_out = (t, there) if SCATTER else (there // k, t)
    v = tl.load(addresses(Matrix(x, stride_x, None), of_x, n), mask=mask)
    if gates is not None:
        v = v.to(tl.float32) * tl.load(gates + there, mask=t < M, other=0.0).to(tl.float32)[:, None]
    tl.store(addresses(Matrix(out, N, None), of_out, n), v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _seen_finite(h, offsets, a, G, M, R, rank, stride_hm, BLOCK_H: tl.constexpr):
    """Whether h = x A_a^T of the adapter's first token says that A_a is finite: what is not makes all of a column not finite.
    So it does for an adapter without tokens, which nothing reads."""
    lo, hi = bounds_of(offsets, a, G, M)
    r = tl.arange(0, BLOCK_H)
    inside = r < tl.where(lo < hi, tl.minimum(rank, R), 0)
    v = tl.load(h + lo.to(tl.int64) * stride_hm + r, mask=inside, other=0.0).to(tl.float32)
    return tl.max((v - v != 0).to(tl.int32), axis=0) == 0


@kernel("x out")
def bank_kernel(
    x, ranks, out, flags, h, offsets, P, Q, height, pitch, M, G, R, stride_xa, stride_xp, stride_xq, stride_hm,
    dtype: tl.constexpr, COPY: tl.constexpr, APART: tl.constexpr, BY_ROW: tl.constexpr,
    STEP: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """(G, P, Q) -> (G, height, Q), zeros below and beyond a rank (of rows where BY_ROW), rows ``pitch`` apart. ``flags``: of
    each adapter and program, whether a number is not finite. What no step of STEP reads is not written. APART: only the last
    step is, of a rank that is no multiple; (G, STEP, Q) where BY_ROW, else (G, P, STEP). ``h``: where that says that all is
    finite, only what is written is read. PDL: it ends after the kernel ahead, beside which it runs: what waits for this one
    waits for both."""
    a, chunk = tl.program_id(0), tl.program_id(1)
    rank = tl.load(ranks + a) if ranks is not None else tl.maximum(P, Q)
    read = tl.minimum(P, rank) if BY_ROW else P
    wide = Q if BY_ROW else tl.minimum(Q, rank)
    written = tl.minimum(height, tl.cdiv(read, STEP) * STEP) if BY_ROW else height
    across = Q if BY_ROW else tl.minimum(Q, tl.cdiv(wide, STEP) * STEP)
    ends = read if BY_ROW else wide
    whole, behind = ends // STEP * STEP, tl.cdiv(ends, STEP) * STEP  # of the step that is written where APART
    if APART and BY_ROW:
        written = behind
    elif APART:
        across = behind
    # 0 times what is not finite is NaN, and stays one in the sum of what a thread has loaded at once: few instructions
    # for each. As a test, and the maximum of a row in every tile, they were 16, which took longer than the loads.
    EIGHT: tl.constexpr = 8 if BLOCK_Q > 8 else BLOCK_Q
    nans = zeros(BLOCK_P, BLOCK_Q // EIGHT)
    columns = tl.cdiv(across, BLOCK_Q)
    begin, end = chunk, tl.cdiv(written, BLOCK_P) * columns
    if h is not None:  # noqa: SIM102  it must not be looked at
        if _seen_finite(h, offsets, a, G, M, R, rank, stride_hm, BLOCK_H):
            if APART and BY_ROW:
                begin += whole // BLOCK_P * columns
            elif not APART:
                begin = end
    for i in tl.range(begin, end, CHUNKS, num_stages=STAGES):
        p, q = i // columns * BLOCK_P + tl.arange(0, BLOCK_P), i % columns * BLOCK_Q + tl.arange(0, BLOCK_Q)
        at = addresses(Matrix(x + tl.cast(a, tl.int64) * stride_xa, stride_xp, stride_xq), p, q)
        # By eights: a rank that is only known here would make loads and stores as narrow as one number.
        near = q // 8 * 8 < across
        t = tl.load(at, mask=both(p < read, near & (q < Q)), other=0.0)
        t = tl.where((q < wide)[None, :], t, 0.0).to(dtype)
        nans += tl.sum(tl.reshape(t.to(tl.float32) * 0.0, (BLOCK_P, BLOCK_Q // EIGHT, EIGHT)), axis=2)
        if COPY:
            at = out + (tl.cast(a, tl.int64) * height + p[:, None]) * pitch + q[None, :]
            tl.store(at, t, mask=both(p < written, near & (q < pitch)))
        if APART:
            if BY_ROW:
                if (i // columns + 1) * BLOCK_P > whole:
                    at = out + (tl.cast(a, tl.int64) * STEP + p[:, None] - whole) * pitch + q[None, :]
                    tl.store(at, t, mask=both((p >= whole) & (p < behind), near & (q < pitch)))
            elif (i % columns + 1) * BLOCK_Q > whole:
                at = out + (tl.cast(a, tl.int64) * P + p[:, None]) * STEP + (q - whole)[None, :]
                tl.store(at, t, mask=both(p < P, near & (q // 8 * 8 >= whole)))
    bad = tl.max(tl.max((nans != 0).to(tl.int32), axis=1), axis=0)
    tl.store(flags + a * CHUNKS + chunk, bad)
    if PDL:
        gdc_wait()


@kernel("x out")
def multi_drop_kernel(
    x, out, seed, order, ids, keys, scale, M, G, K, stride_xm, stride_xk,
    APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    t, k = block_on(0, BLOCK_M), block_on(1, BLOCK_K)
    at = addresses(Matrix(x, stride_xm, stride_xk), place_of(order, t, t < M), k)
    v = tl.load(at, mask=within(t, k, M, K)).to(tl.float32)
    if APART:
        scale = scale_of(seed, vector(ids, t, M), G)[:, None]
    v = tl.where(keep_by_segments(keys, t, k, M), v * scale, 0.0)
    store(v, Matrix(out, K, None), t, k, M, K)
