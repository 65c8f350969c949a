"""All sums of the gradient through a row norm in one pass over W, and what adds them up; see fdora/triton/norm_bwd.py.

W is the left operand of both products, out of shared memory where wgmma takes it: as the right one, of few rows, it would go
through registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.norm_bwd import slopes, stored_onto
from fdora.triton.kernels.tile import Matrix, block_on, loaded, within, zeros
from fdora.triton.runtime.cost import kernel


@triton.jit
def _gram(
    F, dc, c, out, part, begin, end, N, R, WITH_Q: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """(q F)^T F or F^T F of rows ``begin`` to ``end`` of F (N, R): one of the (parts, R, R)."""
    r, i = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    acc = zeros(BLOCK_R, BLOCK_R)
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + i
        f = loaded(F, n, r, end, R)
        right = f
        if WITH_Q:  # on the right: the left one would go through registers (private.NOT_AHEAD)
            right = (slopes(dc, c, n, N)[:, None] * f.to(tl.float32)).to(f.dtype)
        acc = tl.dot(tl.trans(f), right, acc, input_precision=PRECISION)
    tl.store(out + part * R * R + r[None, :] * R + r[:, None], acc, mask=within(r, r, R, R))


@triton.jit
def _of_W(
    W, F, dc, c, parts, p, P, Q, R, span,
    COLUMNS: tl.constexpr, TERMS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """W F of some rows p and ``span`` columns q of W (P, Q), F (Q, R); of COLUMNS W^T (dc / c) F, W (Q, P)."""
    strips, r = tl.cdiv(P, BLOCK_P), tl.arange(0, BLOCK_R)
    part = p // strips
    i = p % strips * BLOCK_P + tl.arange(0, BLOCK_P)
    acc = zeros(BLOCK_P, BLOCK_R)
    for j0 in tl.range(part * span, min(part * span + span, Q), BLOCK_Q):
        j = j0 + tl.arange(0, BLOCK_Q)
        if COLUMNS:
            w, v = loaded(W, j, i, Q, P), loaded(F, j, r, Q, R)
            v = slopes(dc, c, j, Q)[:, None] * v.to(tl.float32)
        else:
            w, v = loaded(W, i, j, P, Q), loaded(F, j, r, Q, R)
        first = v.to(w.dtype)
        acc = tl.dot(tl.trans(w) if COLUMNS else w, first, acc)
        if TERMS == 2:
            acc = tl.dot(tl.trans(w) if COLUMNS else w, (v.to(tl.float32) - first.to(tl.float32)).to(w.dtype), acc)
    at = (part * R + r)[None, :].to(tl.int64) * P + i[:, None]
    tl.store(parts + at, acc, mask=within(i, r, P, R))


@kernel("W A B parts_A parts_B gram_A gram_B", "N K R W?parts_A, N K R W?parts_B, R R N A?parts_A, R R K A?parts_B")
def norm_pass_kernel(
    dc, c,  # (N,)
    W, A, B,  # (N, K), (R, K), (N, R)
    parts_A, parts_B, gram_A, gram_B,  # (parts, R, K), (parts, R, N), (GRAMS, R, R) twice
    N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br, rows_of_part, columns_of_part,
    GRAMS: tl.constexpr, TERMS_A: tl.constexpr, TERMS_B: tl.constexpr, PRECISION_A: tl.constexpr, PRECISION_B: tl.constexpr,
    GRAM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """All sums of both gradients: (q B)^T W (r, K) over parts of the rows, A W^T (r, N) over parts of the columns, and
    (q B)^T B and A A^T over GRAMS of each. Which of them, the number of the program says."""
    W, A, B = Matrix(W, stride_wn, stride_wk), Matrix(A, stride_ak, stride_ar), Matrix(B, stride_bn, stride_br)
    p = tl.program_id(0)
    grams = GRAMS * (2 if parts_A is not None and parts_B is not None else 1)
    of_A = tl.cdiv(K, BLOCK_K) * tl.cdiv(N, rows_of_part) if parts_A is not None else 0
    if p < grams:
        part = p % GRAMS
        if parts_A is not None and p < GRAMS:
            span = tl.cdiv(N, GRAMS)
            end = min(part * span + span, N)
            _gram(B, dc, c, gram_A, part, part * span, end, N, R, True, PRECISION_B, GRAM_BLOCK, BLOCK_R)
        elif parts_B is not None:
            span = tl.cdiv(K, GRAMS)
            end = min(part * span + span, K)
            _gram(A, dc, c, gram_B, part, part * span, end, N, R, False, PRECISION_A, GRAM_BLOCK, BLOCK_R)
    elif parts_A is not None and p < grams + of_A:
        _of_W(W, B, dc, c, parts_A, p - grams, K, N, R, rows_of_part, True, TERMS_A, BLOCK_K, BLOCK_N, BLOCK_R)
    elif parts_B is not None:
        p_B = p - grams - of_A
        _of_W(W, A, None, None, parts_B, p_B, N, K, R, columns_of_part, False, TERMS_B, BLOCK_N, BLOCK_K, BLOCK_R)


@triton.jit
def _added(
    parts, gram, F, onto, out, by_row, s, i, j, Q, R,
    PARTS: tl.constexpr, GRAMS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """onto + s by_row (sum of parts + s G F) at rows i and columns j, all of (R, Q): parts in their order."""
    r = tl.arange(0, BLOCK_R)
    g = zeros(i.shape[0], BLOCK_R)
    for p in range(0, GRAMS):
        at_g = gram + (p * R + i)[:, None] * R + r[None, :]
        g += tl.load(at_g, mask=within(i, r, R, R), other=0.0)
    f = loaded(F, r, j, R, Q)
    total = zeros(i.shape[0], j.shape[0])
    for p in range(0, PARTS):
        at = parts + (p * R + i)[:, None].to(tl.int64) * Q + j[None, :]
        total += tl.load(at, mask=within(i, j, R, Q), other=0.0)
    total += s * tl.dot(g.to(f.dtype), f, input_precision=PRECISION)
    stored_onto(s * by_row * total, onto, out, i, j, R, Q)


@kernel("parts_A parts_B gram_A gram_B A B onto_A onto_B dA dB", "R K R A?parts_A, R N R A?parts_B")
def norm_add_kernel(
    parts_A, parts_B, gram_A, gram_B,  # (parts, R, K), (parts, R, N), (GRAMS, R, R) twice
    A, B,  # (R, K), (N, R)
    dc, c,  # (N,)
    onto_A, onto_B, dA, dB,  # (R, K), (N, R), (R, K), (N, R)
    s, N, K, R, stride_ar, stride_ak, stride_bn, stride_br,
    PARTS_A: tl.constexpr, PARTS_B: tl.constexpr, GRAMS: tl.constexpr, PRECISION_A: tl.constexpr, PRECISION_B: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """dA = s (parts + s G A), G = (q B)^T B, and dB^T = s (parts + s G B^T) q, G = A A^T, which is symmetric; each beside
    what is in its ``onto``."""
    p, i = tl.program_id(0), block_on(1, BLOCK_I)
    of_A = tl.cdiv(K, BLOCK_J) if parts_A is not None else 0
    if parts_A is not None and p < of_A:
        j = p * BLOCK_J + tl.arange(0, BLOCK_J)
        _added(
            parts_A, gram_A, Matrix(A, stride_ar, stride_ak), onto_A, Matrix(dA, K, 1), 1.0, s, i, j, K, R,
            PARTS_A, GRAMS, PRECISION_A, BLOCK_R,
        )
    elif parts_B is not None:
        j = (p - of_A) * BLOCK_J + tl.arange(0, BLOCK_J)
        q = slopes(dc, c, j, N)[None, :]
        _added(
            parts_B, gram_B, Matrix(B, stride_br, stride_bn), onto_B, Matrix(dB, 1, R), q, s, i, j, N, R,
            PARTS_B, GRAMS, PRECISION_B, BLOCK_R,
        )
