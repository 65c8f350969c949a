"""The gradients of an adapted table, and sums of the rows that share a number; see fdora/triton/embedding_bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.embedding import rows_of
from fdora.triton.kernels.g import EPS, floored, g_of
from fdora.triton.kernels.tile import Matrix, addresses, block_on, both, loaded, store, vector, within, zeros
from fdora.triton.runtime.cost import embedding_bwd, kernel


@kernel("dy ids h b partial_A partial_Y partial_m", rest=embedding_bwd)
def embedding_bwd_kernel(
    dy,  # (T, D)
    ids,  # (T,)
    W, h, b,  # (V, D), (T, R), (D, R)
    partial_A, partial_Y, partial_m,  # (strips, T, R), (parts, D, R), (parts, D)
    T, V, D, R, padding, stride_dy, stride_wv, stride_wd,
    ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Of one strip of columns and ROWS tokens: dy b for each token, and the sums of dy^T h and of dy w over them."""
    d, r = block_on(0, BLOCK_D), tl.arange(0, BLOCK_R)
    in_d, in_r = d < D, r < R
    part = tl.program_id(1)
    if partial_A is not None:
        bt = loaded(Matrix(b, R, 1), d, r, D, R)
    if partial_Y is not None:
        sum_Y = zeros(BLOCK_D, BLOCK_R)
    if partial_m is not None:
        sum_m = zeros(BLOCK_T, BLOCK_D)
    for i in range(0, ROWS, BLOCK_T):
        t = part * ROWS + i + tl.arange(0, BLOCK_T)
        v = vector(ids, t, T).to(tl.int64)
        known = (t < T) & (v >= 0) & (v < V) & (v != padding)
        if partial_m is not None:
            w = rows_of(Matrix(W, stride_wv, stride_wd), v, known, d, D)
        # columns of 32 bits: with those of rows_of, of 64, a pass over 8192 tokens takes 1.12 as long on an H200
        dt = tl.load(addresses(Matrix(dy, stride_dy, None), t, d), mask=both(known, in_d), other=0.0)
        if partial_Y is not None:
            ht = tl.load(addresses(Matrix(h, R, None), t, r), mask=both(known, in_r), other=0.0)
            sum_Y = tl.dot(tl.trans(dt), ht, sum_Y, input_precision="ieee")
        if partial_A is not None:
            at_p = partial_A + (tl.program_id(0).to(tl.int64) * T + t[:, None].to(tl.int64)) * R + r[None, :]
            tl.store(at_p, tl.dot(dt, bt, input_precision="ieee"), mask=within(t, r, T, R))
        if partial_m is not None:
            sum_m += dt.to(tl.float32) * w.to(tl.float32)
    at = part.to(tl.int64) * D + d
    if partial_Y is not None:
        tl.store(addresses(Matrix(partial_Y, R, None), at, r), sum_Y, mask=within(d, r, D, R))
    if partial_m is not None:
        tl.store(partial_m + at, tl.sum(sum_m, axis=0), mask=in_d)


@kernel("partial_Y partial_m B dB")
def embedding_finish_kernel(
    partial_Y, partial_m,  # (parts, D, R), (parts, D)
    B,  # (D, R)
    m, c,  # (D,)
    dB, dm, dc,  # (D, R), (D,), (D,)
    s, D, R, parts, stride_bd, stride_br,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """dB = s g Y, dm = (sum dy w + s sum_r B Y) / c and dc = -dm g, from the parts of Y = dy^T h in their order."""
    d, r = block_on(0, BLOCK_D), tl.arange(0, BLOCK_R)
    in_d, mask = d < D, within(d, r, D, R)
    at = d[:, None].to(tl.int64) * R + r[None, :]
    Y = zeros(BLOCK_D, BLOCK_R)
    base = zeros(BLOCK_D)
    for i in range(0, parts):
        Y += tl.load(partial_Y + tl.cast(i, tl.int64) * D * R + at, mask=mask, other=0.0)
        if dm is not None or dc is not None:
            base += tl.load(partial_m + tl.cast(i, tl.int64) * D + d, mask=in_d, other=0.0)
    cd = tl.load(c + d, mask=in_d, other=1.0)
    g = g_of(m, cd, d, D)
    if dB is not None:
        store(s * g[:, None] * Y, Matrix(dB, R, None), d, r, D, R)
    if dm is not None or dc is not None:
        b = loaded(Matrix(B, stride_bd, stride_br), d, r, D, R)
        low = s * tl.sum(Y * b.to(tl.float32), axis=1)
        total = tl.div_rn(base + low, floored(cd))
        if dm is not None:
            tl.store(dm + d, total.to(dm.dtype.element_ty), mask=in_d)
        if dc is not None:
            tl.store(dc + d, tl.where(cd.to(tl.float32) > EPS, -total * g, 0.0), mask=in_d)


@triton.jit
def _joined(first_a, sum_a, first_b, sum_b):
    """Two runs side by side; ``first``: whether one begins a number anew."""
    return first_a | first_b, tl.where(first_b != 0, sum_b, sum_a + sum_b)


@kernel("partial_A key order sums")
def segment_scan_kernel(
    partial_A,  # (parts, T, R)
    key, order,  # (T,)
    sums,  # (T, R)
    T, R, parts, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Values of tokens, each the sum of its parts, in the order of their numbers: sums[i] is that of its number, in this block
    and up to i."""
    i, r = block_on(0, BLOCK_T), tl.arange(0, BLOCK_R)
    in_t = i < T
    t = tl.load(order + i, mask=in_t, other=0).to(tl.int64)
    number = tl.load(key + i, mask=in_t, other=0)
    before = tl.load(key + i - 1, mask=in_t & (i > 0), other=0)
    first = (i == tl.program_id(0) * BLOCK_T) | (number != before)
    mask = within(i, r, T, R)
    value = zeros(BLOCK_T, BLOCK_R)
    for p in range(0, parts):
        at = (tl.cast(p, tl.int64) * T + t)[:, None] * R + r[None, :]
        value += tl.load(partial_A + at, mask=mask, other=0.0)
    flags = tl.broadcast_to(first.to(tl.int32)[:, None], (BLOCK_T, BLOCK_R))
    _, total = tl.associative_scan((flags, value), 0, _joined)
    store(total, Matrix(sums, R, None), i, r, T, R)


@kernel("sums sums key")
def segment_total_kernel(
    sums, key,  # (T, R), (T,)
    out,  # (R, V), or (T, R) of COMPACT
    T, V, R, padding, stride_ov, stride_or,
    COMPACT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """The sum of each number to its column of ``out``, or of COMPACT to the row of its last token.

    The number that a block begins with may have begun before: the last sums of the blocks that end in it belong to it.
    """
    first = tl.program_id(0) * BLOCK_T
    i, r = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    in_t, in_r = i < T, r < R
    number = tl.load(key + i, mask=in_t, other=-1).to(tl.int64)
    after = tl.load(key + i + 1, mask=i + 1 < T, other=-1).to(tl.int64)
    own = tl.load(key + first).to(tl.int64)
    carry = zeros(BLOCK_R)
    for c0 in range(0, tl.program_id(0), BLOCK_C):
        end = (c0 + tl.arange(0, BLOCK_C) + 1) * BLOCK_T - 1
        same = (end < first) & (vector(key, end, first).to(tl.int64) == own)
        carry += tl.sum(
            tl.load(sums + end[:, None].to(tl.int64) * R + r[None, :], mask=both(same, in_r), other=0.0), axis=0
        )
    total = tl.load(sums + i[:, None].to(tl.int64) * R + r[None, :], mask=both(in_t, in_r), other=0.0)
    total = tl.where((number == own)[:, None], carry[None, :] + total, total)
    last = in_t & ((number != after) | (i + 1 == T)) & (number >= 0) & (number < V) & (number != padding)
    at = (i.to(tl.int64) if COMPACT else number)[:, None] * stride_ov + r[None, :].to(tl.int64) * stride_or
    tl.store(out + at, total.to(out.dtype.element_ty), mask=both(last, in_r))
