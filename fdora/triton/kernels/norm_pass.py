"""All sums of the gradient through a row norm in one pass over W, and what adds them up; see fdora/triton/norm_bwd.py.

W is the left operand of both products, out of shared memory where wgmma takes it: as the right one, of few rows, it would go
through registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.norm_bwd import slopes
from fdora.triton.runtime.cost import launched


@triton.jit
def _gram(
    F, dc, c, out, part, begin, end, N, R, stride_n, stride_r, WITH_Q: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """(q F)^T F or F^T F of rows ``begin`` to ``end`` of F (N, R): one of the (parts, R, R)."""
    r, i = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + i
        at = F + n[:, None].to(tl.int64) * stride_n + r[None, :].to(tl.int64) * stride_r
        f = tl.load(at, mask=(n < end)[:, None] & (r < R)[None, :], other=0.0)
        left = f
        if WITH_Q:
            left = (slopes(dc, c, n, N)[:, None] * f.to(tl.float32)).to(f.dtype)
        acc = tl.dot(tl.trans(left), f, acc, input_precision=PRECISION)
    mask = (r < R)[:, None] & (r < R)[None, :]
    tl.store(out + (part * R + r)[:, None] * R + r[None, :], acc, mask=mask)


@triton.jit
def _columns_of_W(
    dc, c, W, B, parts, p, strips, N, K, R, stride_wn, stride_wk, stride_bn, stride_br, span,
    TERMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """(q B)^T W of a strip of columns and ``span`` rows."""
    part, r = p // strips, tl.arange(0, BLOCK_R)
    k = p % strips * BLOCK_K + tl.arange(0, BLOCK_K)
    in_k, in_r = (k < K)[None, :], (r < R)[None, :]
    acc = tl.zeros((BLOCK_K, BLOCK_R), tl.float32)
    for n0 in tl.range(part * span, min(part * span + span, N), BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        in_n = (n < N)[:, None]
        w = tl.load(W + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk, mask=in_n & in_k, other=0.0)
        b = tl.load(B + n[:, None].to(tl.int64) * stride_bn + r[None, :].to(tl.int64) * stride_br, mask=in_n & in_r, other=0.0)
        v = slopes(dc, c, n, N)[:, None] * b.to(tl.float32)
        first = v.to(w.dtype)
        acc = tl.dot(tl.trans(w), first, acc)
        if TERMS == 2:
            acc = tl.dot(tl.trans(w), (v - first.to(tl.float32)).to(w.dtype), acc)
    at = (part * R + r)[None, :].to(tl.int64) * K + k[:, None]
    tl.store(parts + at, acc, mask=(k < K)[:, None] & in_r)


@triton.jit
def _rows_of_W(
    W, A, parts, p, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, span,
    TERMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """A W^T of some rows and ``span`` columns."""
    strips, r = tl.cdiv(N, BLOCK_N), tl.arange(0, BLOCK_R)
    part = p // strips
    n = p % strips * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n, in_r = (n < N)[:, None], (r < R)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for k0 in tl.range(part * span, min(part * span + span, K), BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        at_w = W + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
        w = tl.load(at_w, mask=in_n & (k < K)[None, :], other=0.0)
        at_a = A + r[None, :].to(tl.int64) * stride_ar + k[:, None].to(tl.int64) * stride_ak
        a = tl.load(at_a, mask=in_r & (k < K)[:, None], other=0.0)
        first = a.to(w.dtype)
        acc = tl.dot(w, first, acc)
        if TERMS == 2:
            acc = tl.dot(w, (a.to(tl.float32) - first.to(tl.float32)).to(w.dtype), acc)
    at = (part * R + r)[None, :].to(tl.int64) * N + n[:, None]
    tl.store(parts + at, acc, mask=in_n & in_r)


@triton.jit(launch_metadata=launched)
def norm_pass_kernel(
    dc, c, W, A, B, parts_A, parts_B, gram_A, gram_B, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn,
    stride_br, rows_of_part, columns_of_part, NEED_A: tl.constexpr, NEED_B: tl.constexpr, GRAMS: tl.constexpr,
    TERMS_A: tl.constexpr, TERMS_B: tl.constexpr, PRECISION_A: tl.constexpr, PRECISION_B: tl.constexpr,
    GRAM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """All sums of both gradients: (q B)^T W (r, K) over parts of the rows, A W^T (r, N) over parts of the columns, and
    (q B)^T B and A A^T over GRAMS of each. Which of them, the number of the program says."""
    p = tl.program_id(0)
    grams = GRAMS * ((1 if NEED_A else 0) + (1 if NEED_B else 0))
    strips = tl.cdiv(K, BLOCK_K)
    of_A = strips * tl.cdiv(N, rows_of_part) if NEED_A else 0
    if p < grams:
        part = p % GRAMS
        if NEED_A and p < GRAMS:
            span = tl.cdiv(N, GRAMS)
            _gram(
                B, dc, c, gram_A, part, part * span, min(part * span + span, N), N, R, stride_bn, stride_br,
                True, PRECISION_B, GRAM_BLOCK, BLOCK_R,
            )
        elif NEED_B:
            span = tl.cdiv(K, GRAMS)
            _gram(
                A, dc, c, gram_B, part, part * span, min(part * span + span, K), N, R, stride_ak, stride_ar,
                False, PRECISION_A, GRAM_BLOCK, BLOCK_R,
            )
    elif NEED_A and p < grams + of_A:
        _columns_of_W(
            dc, c, W, B, parts_A, p - grams, strips, N, K, R, stride_wn, stride_wk, stride_bn, stride_br, rows_of_part,
            TERMS_A, BLOCK_N, BLOCK_K, BLOCK_R,
        )
    elif NEED_B:
        _rows_of_W(
            W, A, parts_B, p - grams - of_A, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, columns_of_part,
            TERMS_B, BLOCK_N, BLOCK_K, BLOCK_R,
        )


@triton.jit
def _added(
    parts, gram, F, onto, out, by_row, s, j, Q, R, stride_fr, stride_fj, stride_or, stride_oj, PARTS: tl.constexpr,
    GRAMS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, i,
):
    """onto + s by_row (sum of parts + s G F) at rows i and columns j, all of (R, Q): parts in their order."""
    r = tl.arange(0, BLOCK_R)
    mask = (i < R)[:, None] & (j < Q)[None, :]
    g = tl.zeros((BLOCK_I, BLOCK_R), tl.float32)
    for p in range(0, GRAMS):
        at_g = gram + (p * R + i)[:, None] * R + r[None, :]
        g += tl.load(at_g, mask=(i < R)[:, None] & (r < R)[None, :], other=0.0)
    at_f = F + r[:, None].to(tl.int64) * stride_fr + j[None, :].to(tl.int64) * stride_fj
    f = tl.load(at_f, mask=(r < R)[:, None] & (j < Q)[None, :], other=0.0)
    total = tl.zeros((BLOCK_I, j.shape[0]), tl.float32)
    for p in range(0, PARTS):
        at = parts + (p * R + i)[:, None].to(tl.int64) * Q + j[None, :]
        total += tl.load(at, mask=mask, other=0.0)
    total += s * tl.dot(g.to(f.dtype), f, input_precision=PRECISION)
    at_out = i[:, None].to(tl.int64) * stride_or + j[None, :].to(tl.int64) * stride_oj
    total = s * by_row * total
    if onto is not None:
        total += tl.load(onto + at_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def norm_add_kernel(
    parts_A, parts_B, gram_A, gram_B, A, B, dc, c, onto_A, onto_B, dA, dB, s, N, K, R, stride_ar, stride_ak,
    stride_bn, stride_br,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, PARTS_A: tl.constexpr, PARTS_B: tl.constexpr, GRAMS: tl.constexpr,
    PRECISION_A: tl.constexpr, PRECISION_B: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """dA = s (parts + s G A), G = (q B)^T B, and dB^T = s (parts + s G B^T) q, G = A A^T, which is symmetric; each beside
    what is in its ``onto``."""
    p, i = tl.program_id(0), tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    of_A = tl.cdiv(K, BLOCK_J) if NEED_A else 0
    if NEED_A and p < of_A:
        j = p * BLOCK_J + tl.arange(0, BLOCK_J)
        _added(
            parts_A, gram_A, A, onto_A, dA, 1.0, s, j, K, R, stride_ar, stride_ak, K, 1,
            PARTS_A, GRAMS, PRECISION_A, BLOCK_R, BLOCK_I, i,
        )
    elif NEED_B:
        j = (p - of_A) * BLOCK_J + tl.arange(0, BLOCK_J)
        q = slopes(dc, c, j, N)[None, :]
        _added(
            parts_B, gram_B, B, onto_B, dB, q, s, j, N, R, stride_br, stride_bn, 1, R,
            PARTS_B, GRAMS, PRECISION_B, BLOCK_R, BLOCK_I, i,
        )
