"""The layer for a handful of tokens; see fdora/triton/small.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.product import finish, products
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit(launch_metadata=launched)
def shrink_kernel(
    x, a, part, M, K, R, span, stride_xm, stride_xk, stride_ar, stride_ak, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t, r, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * span
    end = min(begin + span, K)
    at_x = x + t[:, None].to(tl.int64) * stride_xm
    at_a = a + r[None, :].to(tl.int64) * stride_ar
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        at = (k0 + k).to(tl.int64)
        xt = tl.load(at_x + at[None, :] * stride_xk, mask=(t < M)[:, None] & (at < end)[None, :], other=0.0)
        wt = tl.load(at_a + at[:, None] * stride_ak, mask=(at < end)[:, None] & (r < R)[None, :], other=0.0)
        acc = tl.dot(xt, wt.to(xt.dtype), acc)
    at = part + (tl.program_id(1) * M + t)[:, None] * R + r[None, :]
    tl.store(at, acc, mask=(t < M)[:, None] & (r < R)[None, :])


@triton.jit
def slab(b, n, r, N, R, ACROSS: tl.constexpr = 0):
    """Rows r and columns n of b (R, N); ACROSS: transposed."""
    b, stride_br, stride_bn = b
    at = b + tl.expand_dims(r, 1 - ACROSS).to(tl.int64) * stride_br + tl.expand_dims(n, ACROSS).to(tl.int64) * stride_bn
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
        if h[0] is not None:  # noqa: SIM102  one condition is for the compiler, the other for the program
            if tl.program_id(0) == 0:
                at = h[0] + tl.expand_dims(t, 1 - ACROSS) * h[1] + tl.expand_dims(r0 + r, ACROSS)
                tl.store(at, ht, mask=mask_h)
        if dA is not None:  # the columns of u = x that belong to this program
            at = u[0] + t[:, None].to(tl.int64) * u[1] + n[None, :].to(tl.int64) * u[2]
            ut = tl.load(at, mask=(t < M)[:, None] & (n < N)[None, :], other=0.0)
            at = dA + (r0 + r)[:, None].to(tl.int64) * N + n[None, :]
            v = tl.dot(ht if ACROSS else tl.trans(ht), ut)
            tl.store(at, v.to(dA.dtype.element_ty), mask=in_r[:, None] & (n < N)[None, :])
        bt = slab(b, n, r0 + r, N, R, ACROSS) if ahead is None else ahead
        acc = tl.dot(bt.to(dtype), ht, acc) if ACROSS else tl.dot(ht, bt.to(dtype), acc)
    return acc


@triton.jit(launch_metadata=launched)
def small_kernel(
    x, w, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_br, stride_bn, stride_hm, stride_um, stride_un,
    PARTS: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr, STORE_H: tl.constexpr,
    NEED_A: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):
    col = tl.program_id(0) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = products(acc, (x, stride_xm, stride_xk), (w, stride_wk, stride_wn), 0, col, M, N, K, BLOCK_K)
    if PDL:
        gdc_wait()
    acc = low_rank_term(
        acc, None, part, (h, stride_hm), (b, stride_br, stride_bn), (u, stride_um, stride_un), dA, s, col, M, N, R,
        x.dtype.element_ty, PARTS, BLOCK_R, 1 if PARTS > 2 else 2,
    )
    finish(acc, (out, pre_scale, out if ACCUMULATE else None, m, c, bias), 0, col, M, N)


@triton.jit(launch_metadata=launched)
def add_parts_kernel(
    sums, x, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, R, stride_br, stride_bn, stride_hm, stride_um, stride_un,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr,
    STORE_H: tl.constexpr, NEED_A: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AHEAD: tl.constexpr,
):
    """small_kernel where x w is there, in (SPLITS, M, N) parts. Of x the dtype counts. AHEAD: b, of R up to BLOCK_R, is on its
    way before this kernel waits for those ahead of it."""
    col = tl.program_id(0) * BLOCK_N
    B = (b, stride_br, stride_bn)
    t, n = tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    ahead = slab(B, n, tl.arange(0, BLOCK_R), N, R) if AHEAD else None
    if PDL:  # for all that ran ahead: the kernel before this one has waited too
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(SPLITS):  # always in the same order
        at = (i * M + t)[:, None].to(tl.int64) * N + n[None, :]
        acc += tl.load(sums + at, mask=(t < M)[:, None] & (n < N)[None, :], other=0.0)
    acc = low_rank_term(
        acc, ahead, part, (h, stride_hm), B, (u, stride_um, stride_un), dA, s, col, M, N, R,
        x.dtype.element_ty, PARTS, BLOCK_R, 1 if PARTS > 2 else 2,
    )
    finish(acc, (out, pre_scale, out if ACCUMULATE else None, m, c, bias), 0, col, M, N)
