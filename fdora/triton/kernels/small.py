"""The layer for a handful of tokens; see fdora/triton/small.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.product import finish, products
from fdora.triton.kernels.tile import Matrix, addresses, block_on, both, loaded, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def shrunk(x, f, t, r, begin, end, M, K, R, BLOCK_K: tl.constexpr):
    """x f at tokens t and columns r: the terms from ``begin`` to ``end``."""
    at_x, at_f = x.p + t[:, None].to(tl.int64) * x.row, f.p + r[None, :].to(tl.int64) * f.col
    acc = zeros(t.shape[0], r.shape[0])
    for k0 in range(begin, end, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
        xt = tl.load(at_x + k[None, :] * x.col, mask=within(t, k, M, K), other=0.0)
        ft = tl.load(at_f + k[:, None] * f.row, mask=within(k, r, K, R), other=0.0)
        acc = tl.dot(xt, ft.to(xt.dtype), acc)
    return acc


@kernel("x a part", "M R K x")
def shrink_kernel(
    x, a, part, M, K, R, span, stride_xm, stride_xk, stride_ar, stride_ak, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t, r = tl.arange(0, BLOCK_M), block_on(0, BLOCK_R)
    begin = tl.program_id(1) * span
    end = min(begin + span, K)
    acc = shrunk(Matrix(x, stride_xm, stride_xk), Matrix(a, stride_ak, stride_ar), t, r, begin, end, M, end, R, BLOCK_K)
    at = part + (tl.program_id(1) * M + t)[:, None] * R + r[None, :]
    tl.store(at, acc, mask=within(t, r, M, R))


@triton.jit
def slab(b, n, r, N, R, ACROSS: tl.constexpr = 0):
    """Rows r and columns n of b (R, N); ACROSS: transposed."""
    at = b.p + tl.expand_dims(r, 1 - ACROSS).to(tl.int64) * b.row + tl.expand_dims(n, ACROSS).to(tl.int64) * b.col
    return tl.load(at, mask=tl.expand_dims(r < R, 1 - ACROSS) & tl.expand_dims(n < N, ACROSS), other=0.0)


@triton.jit
def low_rank_term(
    acc, ahead, part, h, b, u, dA, s, col, M, N, R,
    dtype: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, ACROSS: tl.constexpr = 0,
):
    """acc + h b, (BLOCK_M, BLOCK_N), with h (M, R) = s times the sum of its PARTS, which is stored, and dA = h^T u. ACROSS: acc
    is transposed. ``ahead``: all of b that it reads, or None. With many parts a second stage of the loop would hold twice as
    many tiles in shared memory as there is, hence STAGES."""
    t, n, r = tl.arange(0, acc.shape[ACROSS]), col + tl.arange(0, acc.shape[1 - ACROSS]), tl.arange(0, BLOCK_R)
    for r0 in tl.range(0, R, BLOCK_R, num_stages=STAGES):
        in_r = r < R - r0
        mask_h = tl.expand_dims(t < M, 1 - ACROSS) & tl.expand_dims(in_r, ACROSS)
        at_h = tl.expand_dims(t, 1 - ACROSS) * R + tl.expand_dims(r0 + r, ACROSS)
        sums = tl.zeros(mask_h.shape, tl.float32)
        for i in tl.static_range(PARTS):  # always in the same order
            sums += tl.load(part + i * M * R + at_h, mask=mask_h, other=0.0)
        ht = (s * sums).to(dtype)
        if h.p is not None:  # noqa: SIM102  one condition is for the compiler, the other for the program
            if tl.program_id(0) == 0:
                at = h.p + tl.expand_dims(t, 1 - ACROSS) * h.row + tl.expand_dims(r0 + r, ACROSS)
                tl.store(at, ht, mask=mask_h)
        if dA is not None:  # the columns of u = x that belong to this program
            ut, at = loaded(u, t, n, M, N), addresses(Matrix(dA, N, None), r0 + r, n)  # later, sm_100 spills an address
            v = tl.dot(ht if ACROSS else tl.trans(ht), ut)
            tl.store(at, v.to(dA.dtype.element_ty), mask=both(in_r, n < N))
        bt = slab(b, n, r0 + r, N, R, ACROSS) if ahead is None else ahead
        acc = tl.dot(bt.to(dtype), ht, acc) if ACROSS else tl.dot(ht, bt.to(dtype), acc)
    return acc


@kernel("x w part h b out pre_scale u dA", "M N K x, M N R x, M N R u")
def small_kernel(
    x, w, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_br, stride_bn, stride_hm, stride_um, stride_un,
    PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    col = tl.program_id(0) * BLOCK_N
    acc = zeros(BLOCK_M, BLOCK_N)
    acc = products(acc, Matrix(x, stride_xm, stride_xk), Matrix(w, stride_wk, stride_wn), 0, col, M, N, K, BLOCK_K)
    if PDL:
        gdc_wait()
    acc = low_rank_term(
        acc, None, part, Matrix(h, stride_hm, None), Matrix(b, stride_br, stride_bn), Matrix(u, stride_um, stride_un), dA, s,
        col, M, N, R, x.dtype.element_ty, PARTS, BLOCK_R, 1 if PARTS > 2 else 2,
    )
    finish(acc, (out, pre_scale, out if ACCUMULATE else None, m, c, bias), 0, col, M, N)


@kernel("sums part h b out pre_scale u dA", "M N R x, M N R u")
def add_parts_kernel(
    sums, x, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, R, stride_br, stride_bn, stride_hm, stride_um, stride_un,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AHEAD: tl.constexpr,
):
    """small_kernel where x w is there, in (SPLITS, M, N) parts. Of x the dtype counts. AHEAD: b, of R up to BLOCK_R, is on its
    way before this kernel waits for those ahead of it."""
    col = tl.program_id(0) * BLOCK_N
    B = Matrix(b, stride_br, stride_bn)
    t, n = tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    ahead = slab(B, n, tl.arange(0, BLOCK_R), N, R) if AHEAD else None
    if PDL:  # for all that ran ahead: the kernel before this one has waited too
        gdc_wait()
    acc = zeros(BLOCK_M, BLOCK_N)
    for i in tl.static_range(SPLITS):  # always in the same order
        at = (i * M + t)[:, None].to(tl.int64) * N + n[None, :]
        acc += tl.load(sums + at, mask=within(t, n, M, N), other=0.0)
    acc = low_rank_term(
        acc, ahead, part, Matrix(h, stride_hm, None), B, Matrix(u, stride_um, stride_un), dA, s, col, M, N, R,
        x.dtype.element_ty, PARTS, BLOCK_R, 1 if PARTS > 2 else 2,
    )
    finish(acc, (out, pre_scale, out if ACCUMULATE else None, m, c, bias), 0, col, M, N)
