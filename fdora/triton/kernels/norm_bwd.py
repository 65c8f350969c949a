"""What stands around the products of the gradient through a row norm; see fdora/triton/norm_bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.jit
def _finished(
    parts,
    G,
    F,
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
    """scale by_row (parts + scale G F) of P x Q: G (P, R) float32 by rows, F (R, Q)."""
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
    at_out = out + i[:, None].to(tl.int64) * stride_oi + j[None, :].to(tl.int64) * stride_oj
    tl.store(at_out, (scale * by_row * total).to(out.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def norm_bwd_finish_kernel(
    parts,
    G,
    A,
    B,
    dc,
    c,
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
    """dA = s (parts + s G A) from (r, K) parts and G = (q B)^T B; or dB = s q (parts + s B G), (N, r) and G = A A^T."""
    first_i, first_j = tl.program_id(0) * BLOCK_I, tl.program_id(1) * BLOCK_J
    if OF_A:
        _finished(
            parts,
            G,
            A,
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
