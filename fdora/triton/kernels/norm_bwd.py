"""What stands around the products of the gradient through a row norm; see fdora/triton/norm_bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.gemm import finish_tma, sum_by_tma
from fdora.triton.runtime.cost import launched


@triton.jit
def slopes(dc, c, n, N):
    """dc / c of rows n; a row with c = 0 has no direction."""
    cn = tl.load(c + n, mask=n < N, other=0.0)
    d = tl.load(dc + n, mask=n < N, other=0.0)
    return tl.where(cn > 0, tl.div_rn(d, tl.where(cn > 0, cn, 1.0)), 0.0)


@triton.jit(launch_metadata=launched)
def norm_terms_kernel(
    dc,
    c,
    B,
    out,
    wide,
    N,
    R,
    stride_bn,
    stride_br,
    WITH_Q: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """B, or q B with q = dc / c, in the dtype of products, (N, TERMS r): a sum of terms, the second what the first has lost. Of
    two also in float32, into ``wide``."""
    n, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (n < N)[:, None] & (r < R)[None, :]
    at_b = B + n[:, None].to(tl.int64) * stride_bn + r[None, :].to(tl.int64) * stride_br
    v = tl.load(at_b, mask=mask, other=0.0).to(tl.float32)
    if WITH_Q:
        v = slopes(dc, c, n, N)[:, None] * v
    at = out + n[:, None].to(tl.int64) * (TERMS * R) + r[None, :]
    first = v.to(out.dtype.element_ty)
    tl.store(at, first, mask=mask)
    if TERMS == 2 and WITH_Q:
        tl.store(wide + n[:, None].to(tl.int64) * R + r[None, :], v, mask=mask)
    if TERMS == 2:
        tl.store(at + R, (v - first.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def norm_tokens_kernel(
    dc, c, B, dz, out, s, N, R, stride_bn, stride_br, stride_dz,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """s (q B)^T into dz (r, N), and s q into ``out``."""
    n, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    q = s * slopes(dc, c, n, N)
    if NEED_B:
        tl.store(out + n, q, mask=n < N)  # every slab of the rank writes the same
    if NEED_A:
        mask = (n < N)[:, None] & (r < R)[None, :]
        b = tl.load(B + n[:, None].to(tl.int64) * stride_bn + r[None, :].to(tl.int64) * stride_br, mask=mask, other=0.0)
        at = dz + r[None, :].to(tl.int64) * stride_dz + n[:, None]
        tl.store(at, (q[:, None] * b.to(tl.float32)).to(dz.dtype.element_ty), mask=mask)


@triton.jit
def _gram_part(
    left, right, out, part, parts, length, R, stride_lr, stride_ln, stride_rn, stride_rr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One tile of left (r, n) times right (n, r), of one part of n, into the (parts, r, r). What is above the diagonal is what
    is below it."""
    tiles = tl.cdiv(R, BLOCK)
    i = tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    span = tl.cdiv(tl.cdiv(length, parts), BLOCK_N) * BLOCK_N
    end = min(part * span + span, length)
    in_i, in_j = (i < R)[:, None], (j < R)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    begin = part * span
    if tl.program_id(0) // tiles < tl.program_id(0) % tiles:
        begin = end
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        at = left + i[:, None].to(tl.int64) * stride_lr + n[None, :].to(tl.int64) * stride_ln
        u = tl.load(at, mask=in_i & (n < end)[None, :], other=0.0)
        at = right + n[:, None].to(tl.int64) * stride_rn + j[None, :].to(tl.int64) * stride_rr
        v = tl.load(at, mask=(n < end)[:, None] & in_j, other=0.0)
        acc = tl.dot(u, v, acc)
    out += part.to(tl.int64) * R * R
    if tl.program_id(0) // tiles >= tl.program_id(0) % tiles:
        tl.store(out + i[:, None] * R + j[None, :], acc, mask=in_i & in_j)
    if tl.program_id(0) // tiles > tl.program_id(0) % tiles:
        tl.store(out + j[None, :] * R + i[:, None], acc, mask=in_i & in_j)


@triton.jit(launch_metadata=launched)
def norm_grams_kernel(
    dz, A, B, parts_A, parts_B, N, K, R, stride_dz, stride_ar, stride_ak, stride_bn, stride_br,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dz B and A A^T, each in PARTS of its sums."""
    part = tl.program_id(1)
    if NEED_A and part < PARTS:
        _gram_part(dz, B, parts_A, part, PARTS, N, R, stride_dz, 1, stride_bn, stride_br, BLOCK, BLOCK_N)
    elif NEED_B:
        _gram_part(A, A, parts_B, part % PARTS, PARTS, K, R, stride_ar, stride_ak, stride_ak, stride_ar, BLOCK, BLOCK_N)


@triton.jit
def _parts_added(parts, out, s, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(PARTS):
        total += tl.load(parts + tl.cast(p, tl.int64) * size + at, mask=at < size, other=0.0)
    tl.store(out + at, (s * total).to(out.dtype.element_ty), mask=at < size)


@triton.jit(launch_metadata=launched)
def norm_grams_add_kernel(
    parts_A, parts_B, gram_A, gram_B, s, size,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """s times the sum of the parts of each, in their order."""
    if NEED_A and tl.program_id(1) == 0:
        _parts_added(parts_A, gram_A, s, size, PARTS, BLOCK)
    elif NEED_B:
        _parts_added(parts_B, gram_B, s, size, PARTS, BLOCK)


@triton.jit(launch_metadata=launched)
def norm_products_kernel(
    dz, w_right, gram_A, a_right, onto_A, dA, w_left, a, B, gram_B, onto_B, dB, slopes, N, K, R,
    TALL: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """dA = onto + dz W + G A and dB = onto + s q (W A^T + B G) by descriptors, each program a tile of one of them: neither
    alone has programs for all of the GPU."""
    p = tl.program_id(0)
    of_A = tl.cdiv(R, TALL) * tl.cdiv(K, WIDE)
    steps_n, steps_k, steps_r = tl.cdiv(N, BLOCK_K), tl.cdiv(K, BLOCK_K), tl.cdiv(R, BLOCK_K)
    if p < of_A:
        row, col = p % tl.cdiv(R, TALL) * TALL, p // tl.cdiv(R, TALL) * WIDE
        u = sum_by_tma(dz, w_right, gram_A, a_right, row, col, steps_n, steps_r, False, TALL, WIDE, BLOCK_K)
        finish_tma(u, (dA, None, onto_A, None, None, None), row, col, R, K, "accumulate", True)
    else:
        row, col = (p - of_A) // tl.cdiv(R, TALL) * WIDE, (p - of_A) % tl.cdiv(R, TALL) * TALL
        v = sum_by_tma(w_left, a, B, gram_B, row, col, steps_k, steps_r, True, WIDE, TALL, BLOCK_K)
        finish_tma(v, (dB, None, onto_B, slopes, None, None), row, col, N, R, "rows", True)


@triton.jit
def _finished(
    parts,
    G,
    F,
    onto,
    out,
    by_row,
    scale,
    first_i,
    first_j,
    P,
    Q,
    R,
    stride_pi,
    stride_pj,
    term,
    stride_fr,
    stride_fj,
    stride_oi,
    stride_oj,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """onto + scale by_row (parts + scale G F) of P x Q: G (P, R) float32 by rows, F (R, Q)."""
    i, j = first_i + tl.arange(0, BLOCK_I), first_j + tl.arange(0, BLOCK_J)
    mask = (i < P)[:, None] & (j < Q)[None, :]
    acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        g = tl.load(G + i[:, None].to(tl.int64) * R + r[None, :], mask=(i < P)[:, None] & (r < R)[None, :], other=0.0)
        at_f = F + r[:, None].to(tl.int64) * stride_fr + j[None, :].to(tl.int64) * stride_fj
        f = tl.load(at_f, mask=(r < R)[:, None] & (j < Q)[None, :], other=0.0)
        acc = tl.dot(g.to(f.dtype), f, acc, input_precision=PRECISION)
    at = parts + i[:, None].to(tl.int64) * stride_pi + j[None, :].to(tl.int64) * stride_pj
    total = tl.load(at, mask=mask, other=0.0) + scale * acc
    if TERMS == 2:
        total += tl.load(at + term, mask=mask, other=0.0)
    at_out = i[:, None].to(tl.int64) * stride_oi + j[None, :].to(tl.int64) * stride_oj
    total = scale * by_row * total
    if onto is not None:
        total += tl.load(onto + at_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def norm_bwd_finish_kernel(
    parts,
    G,
    A,
    B,
    dc,
    c,
    onto,
    out,
    s,
    N,
    K,
    R,
    stride_ar,
    stride_ak,
    stride_bn,
    stride_br,
    OF_A: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """dA = s (parts + s G A) from (r, K) parts and G = (q B)^T B; or dB = s q (parts + s B G), (N, r) and G = A A^T. Beside
    what is in ``onto``."""
    first_i, first_j = tl.program_id(0) * BLOCK_I, tl.program_id(1) * BLOCK_J
    if OF_A:
        _finished(
            parts,
            G,
            A,
            onto,
            out,
            1.0,
            s,
            first_i,
            first_j,
            R,
            K,
            R,
            K,
            1,
            tl.cast(R, tl.int64) * K,
            stride_ar,
            stride_ak,
            K,
            1,
            TERMS,
            PRECISION,
            BLOCK_I,
            BLOCK_J,
            BLOCK_R,
        )
    else:  # G is symmetric: the transpose of B G is G B^T
        n = first_j + tl.arange(0, BLOCK_J)
        q = slopes(dc, c, n, N)[None, :]
        _finished(
            parts,
            G,
            B,
            onto,
            out,
            q,
            s,
            first_i,
            first_j,
            R,
            N,
            R,
            1,
            TERMS * R,
            R,
            stride_br,
            stride_bn,
            1,
            R,
            TERMS,
            PRECISION,
            BLOCK_I,
            BLOCK_J,
            BLOCK_R,
        )
