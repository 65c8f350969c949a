"""The layer for a handful of tokens; see fdora/triton/small.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_of, g_tile
from fdora.triton.kernels.tile import products
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
def _slab(b, n, r, N, R, stride_br, stride_bn):
    at = b + r[:, None].to(tl.int64) * stride_br + n[None, :].to(tl.int64) * stride_bn
    return tl.load(at, mask=(r < R)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def finish(
    acc, squares, col, slab, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, R,
    stride_br, stride_bn, stride_hm, stride_um, stride_un,
    dtype: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr,
    STORE_H: tl.constexpr, NEED_A: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, AHEAD: tl.constexpr,
):
    """What comes with x w, (BLOCK_M, BLOCK_N) in ``acc``: the term of low rank, g, the bias; h and dA. AHEAD: ``slab`` is all
    of b that it reads. ``squares``: of the norm of each column, which goes to c; or None, and c is read."""
    t, n = tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    # With many parts a second stage of this loop would hold twice as many tiles in shared memory as there is.
    for r0 in tl.range(0, R, BLOCK_R, num_stages=1 if PARTS > 2 else 2):
        in_r = r < R - r0
        mask_h = (t < M)[:, None] & in_r[None, :]
        at_h = t[:, None] * R + (r0 + r)[None, :]
        sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for i in tl.static_range(PARTS):  # always in the same order
            sums += tl.load(part + i * M * R + at_h, mask=mask_h, other=0.0)
        ht = (s * sums).to(dtype)
        if STORE_H:  # noqa: SIM102  h is None where this is False, and must not be looked at
            if tl.program_id(0) == 0:
                tl.store(h + t[:, None] * stride_hm + (r0 + r)[None, :], ht, mask=mask_h)
        if NEED_A:  # the columns of u = x that belong to this program
            at = u + t[:, None].to(tl.int64) * stride_um + n[None, :].to(tl.int64) * stride_un
            ut = tl.load(at, mask=(t < M)[:, None] & (n < N)[None, :], other=0.0)
            at = dA + (r0 + r)[:, None].to(tl.int64) * N + n[None, :]
            tl.store(at, tl.dot(tl.trans(ht), ut).to(dA.dtype.element_ty), mask=in_r[:, None] & (n < N)[None, :])
        bt = slab if AHEAD else _slab(b, n, r0 + r, N, R, stride_br, stride_bn)
        acc = tl.dot(ht, bt.to(ht.dtype), acc)
    mask = (t < M)[:, None] & (n < N)[None, :]
    at = t[:, None].to(tl.int64) * N + n[None, :]
    if STORE_PRE_SCALE:
        tl.store(pre_scale + at, acc.to(pre_scale.dtype.element_ty), mask=mask)
    if SCALE:
        if squares is None:
            g = g_tile(m, c, n, N)
        else:
            norm = tl.sqrt_rn(squares)
            tl.store(c + n, norm, mask=n < N)
            g = g_of(m, norm, n, N)
        acc = acc * g[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:  # no other program touches this tile
        acc += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


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
    acc = products(acc, x, w, 0, col, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K)
    if PDL:
        gdc_wait()
    finish(
        acc, None, col, None, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, R,
        stride_br, stride_bn, stride_hm, stride_um, stride_un, x.dtype.element_ty,
        PARTS, SCALE, HAS_BIAS, STORE_PRE_SCALE, STORE_H, NEED_A, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_R, False,
    )


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
    t, n = tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    slab = _slab(b, n, tl.arange(0, BLOCK_R), N, R, stride_br, stride_bn) if AHEAD else None
    if PDL:  # for all that ran ahead: the kernel before this one has waited too
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(SPLITS):  # always in the same order
        at = (i * M + t)[:, None].to(tl.int64) * N + n[None, :]
        acc += tl.load(sums + at, mask=(t < M)[:, None] & (n < N)[None, :], other=0.0)
    finish(
        acc, None, col, slab, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, R,
        stride_br, stride_bn, stride_hm, stride_um, stride_un, x.dtype.element_ty,
        PARTS, SCALE, HAS_BIAS, STORE_PRE_SCALE, STORE_H, NEED_A, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_R, AHEAD,
    )
