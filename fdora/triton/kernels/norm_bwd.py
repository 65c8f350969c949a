"""What stands around the products of the gradient through a row norm; see fdora/triton/norm_bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.gemm import finish_tma, sum_by_tma
from fdora.triton.kernels.tile import Matrix, addresses, block_on, loaded, put, store, vector, within, zeros
from fdora.triton.runtime.cost import kernel, moved, product


@triton.jit
def slopes(dc, c, n, N):
    """dc / c of rows n; a row with c = 0 has no direction."""
    cn = vector(c, n, N)
    d = vector(dc, n, N)
    return tl.where(cn > 0, tl.div_rn(d, tl.where(cn > 0, cn, 1.0)), 0.0)


@triton.jit
def stored_onto(total, onto, out, i, j, P, Q):
    """Into a Matrix (P, Q) at rows i and columns j; to what is in ``onto``, which lies as it does."""
    at = i[:, None].to(tl.int64) * out.row + j[None, :].to(tl.int64) * out.col
    mask = within(i, j, P, Q)
    if onto is not None:
        total += tl.load(onto + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out.p + at, total.to(out.p.dtype.element_ty), mask=mask)


@kernel("B out")
def norm_terms_kernel(
    dc, c,  # (N,)
    B,  # (N, R)
    out, wide,  # (N, TERMS R), (N, R) float32
    N, R, stride_bn, stride_br,
    WITH_Q: tl.constexpr, TERMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """B, or q B with q = dc / c, in the dtype of products: a sum of terms, the second what the first has lost. Of two also in
    float32, into ``wide``."""
    n, r = block_on(0, BLOCK_N), block_on(1, BLOCK_R)
    v = loaded(Matrix(B, stride_bn, stride_br), n, r, N, R).to(tl.float32)
    if WITH_Q:
        v = slopes(dc, c, n, N)[:, None] * v
    first = v.to(out.dtype.element_ty)
    store(first, Matrix(out, TERMS * R, None), n, r, N, R)
    if TERMS == 2 and WITH_Q:
        store(v, Matrix(wide, R, None), n, r, N, R)
    if TERMS == 2:
        at = addresses(Matrix(out, TERMS * R, None), n, r)
        tl.store(at + R, (v - first.to(tl.float32)).to(out.dtype.element_ty), mask=within(n, r, N, R))


@kernel("B?dz dz out")
def norm_tokens_kernel(
    dc, c,  # (N,)
    B,  # (N, R)
    dz, out,  # (R, N), (N,)
    s, N, R, stride_bn, stride_br, stride_dz,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """s (q B)^T into dz, and s q into ``out``."""
    n, r = block_on(0, BLOCK_N), block_on(1, BLOCK_R)
    q = s * slopes(dc, c, n, N)
    if out is not None:
        put(q, out, n, N)  # every slab of the rank writes the same
    if dz is not None:
        b = loaded(Matrix(B, stride_bn, stride_br), n, r, N, R)
        at = dz + r[None, :].to(tl.int64) * stride_dz + n[:, None]
        tl.store(at, (q[:, None] * b.to(tl.float32)).to(dz.dtype.element_ty), mask=within(n, r, N, R))


@triton.jit
def _gram_part(left, right, out, part, parts, length, R, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """One tile of left (R, length) times right (length, R), of one part of the length, into the (parts, R, R). What is above
    the diagonal is what is below it."""
    tiles = tl.cdiv(R, BLOCK)
    row, col = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i, j = row * BLOCK + tl.arange(0, BLOCK), col * BLOCK + tl.arange(0, BLOCK)
    span = tl.cdiv(tl.cdiv(length, parts), BLOCK_N) * BLOCK_N
    end = min(part * span + span, length)
    acc = zeros(BLOCK, BLOCK)
    begin = part * span
    if row < col:
        begin = end
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        acc = tl.dot(loaded(left, i, n, R, end), loaded(right, n, j, end, R), acc)
    out += part.to(tl.int64) * R * R
    mask = within(i, j, R, R)
    if row >= col:
        tl.store(out + i[:, None] * R + j[None, :], acc, mask=mask)
    if row > col:
        tl.store(out + j[None, :] * R + i[:, None], acc, mask=mask)


@kernel("dz A?parts_B B?parts_A parts_A parts_B", "R R N A?parts_A, R R K A?parts_B")
def norm_grams_kernel(
    dz, A, B,  # (R, N), (R, K), (N, R)
    parts_A, parts_B,  # (PARTS, R, R)
    N, K, R, stride_dz, stride_ar, stride_ak, stride_bn, stride_br,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dz B and A A^T, each in PARTS of its sums."""
    part = tl.program_id(1)
    if parts_A is not None and part < PARTS:
        _gram_part(
            Matrix(dz, stride_dz, 1), Matrix(B, stride_bn, stride_br), parts_A, part, PARTS, N, R, BLOCK, BLOCK_N
        )
    elif parts_B is not None:
        left, right = Matrix(A, stride_ar, stride_ak), Matrix(A, stride_ak, stride_ar)
        _gram_part(left, right, parts_B, part % PARTS, PARTS, K, R, BLOCK, BLOCK_N)


@triton.jit
def _parts_added(parts, out, s, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = block_on(0, BLOCK)
    total = zeros(BLOCK)
    for p in tl.static_range(PARTS):
        total += vector(parts + tl.cast(p, tl.int64) * size, at, size)
    put(s * total, out, at, size)


@kernel("parts_A parts_B gram_A gram_B")
def norm_grams_add_kernel(
    parts_A, parts_B,  # (PARTS, size)
    gram_A, gram_B,  # (size,)
    s, size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """s times the sum of the parts of each, in their order."""
    if parts_A is not None and tl.program_id(1) == 0:
        _parts_added(parts_A, gram_A, s, size, PARTS, BLOCK)
    elif parts_B is not None:
        _parts_added(parts_B, gram_B, s, size, PARTS, BLOCK)


@kernel("dz w_left w_left gram_A a onto_A dA B gram_B onto_B dB", "R K N a, R K R a, N R K a, N R R a")
def norm_products_kernel(
    dz, w_right, gram_A, a_right, onto_A, dA,  # descriptors of (R, N), (N, K), (R, R), (R, K), (R, K), (R, K)
    w_left, a, B, gram_B, onto_B, dB,  # descriptors of (N, K), (R, K), (N, R), (R, R), (N, R), (N, R)
    slopes,  # (N,)
    N, K, R,
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
    parts, term, G, F, onto, out, by_row, scale, i, j, P, Q, R,
    TERMS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """onto + scale by_row (parts + scale G F) of P x Q at rows i and columns j: G (P, R) float32 by rows, F (R, Q). A second
    term of the parts lies ``term`` further."""
    acc = zeros(i.shape[0], j.shape[0])
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        f = loaded(F, r, j, R, Q)
        acc = tl.dot(loaded(Matrix(G, R, 1), i, r, P, R).to(f.dtype), f, acc, input_precision=PRECISION)
    total = loaded(parts, i, j, P, Q) + scale * acc
    if TERMS == 2:
        total += loaded(Matrix(parts.p + term, parts.row, parts.col), i, j, P, Q)
    stored_onto(scale * by_row * total, onto, out, i, j, P, Q)


@kernel("parts G onto out", rest=lambda a: product(a.R, a.K if a.OF_A else a.N, a.R, a.A) + moved(a.A if a.OF_A else a.B))
def norm_bwd_finish_kernel(
    parts, G,  # (TERMS R, K) or (N, TERMS R), and (R, R)
    A, B,  # (R, K), (N, R)
    dc, c,  # (N,)
    onto, out,  # (R, K) or (N, R)
    s, N, K, R, stride_ar, stride_ak, stride_bn, stride_br,
    OF_A: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """dA = s (parts + s G A) from (r, K) parts and G = (q B)^T B; or dB = s q (parts + s B G), (N, r) and G = A A^T. Beside
    what is in ``onto``."""
    i, j = block_on(0, BLOCK_I), block_on(1, BLOCK_J)
    if OF_A:
        parts, term, F, out = Matrix(parts, K, 1), tl.cast(R, tl.int64) * K, Matrix(A, stride_ar, stride_ak), Matrix(out, K, 1)
        _finished(parts, term, G, F, onto, out, 1.0, s, i, j, R, K, R, TERMS, PRECISION, BLOCK_R)
    else:  # G is symmetric: the transpose of B G is G B^T
        q = slopes(dc, c, j, N)[None, :]
        parts, F, out = Matrix(parts, 1, TERMS * R), Matrix(B, stride_br, stride_bn), Matrix(out, 1, R)
        _finished(parts, R, G, F, onto, out, q, s, i, j, R, N, R, TERMS, PRECISION, BLOCK_R)
