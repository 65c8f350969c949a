"""The same product for a handful of tokens (decoding): bound by reading W once, so tiles are narrow and many.

    parts of h = s x A^T             one program per slab of the rank and part of K
    out = g (x W + h B) + bias       one program per few columns, all of K, then all of r

On sm_90 and later the second kernel starts while the first one runs (programmatic dependent launch): it streams its part of
W and waits for h only before the products with B, so h costs next to nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import capability, cdiv, gdc_launch_dependents, gdc_wait, launch, overlaps
from fdora.triton._repeat import repeatable
from fdora.triton.configs import SmallConfig, power_of_two, small_config
from fdora.triton.scale import scale_tile

_config = lru_cache(4096)(small_config)

LIMIT = 64  # tokens; from there on the tiles of gemm.py are better filled


@triton.jit
def _down_kernel(
    x, a, part, M, K, R, span, stride_xm, stride_xk, stride_ar, stride_ak, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
def _small_kernel(
    x, w, part, h, b, out, inner, m, c, bias, u, dA, s, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_br, stride_bn, stride_um, stride_un,
    PARTS: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_INNER: tl.constexpr, STORE_H: tl.constexpr,
    NEED_A: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    t, n, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at_x = x + t[:, None].to(tl.int64) * stride_xm + k[None, :].to(tl.int64) * stride_xk
    at_w = w + k[:, None].to(tl.int64) * stride_wk + n[None, :].to(tl.int64) * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        xt = tl.load(at_x, mask=(t < M)[:, None] & (k < K - k0)[None, :], other=0.0)
        wt = tl.load(at_w, mask=(k < K - k0)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(xt, wt, acc)
        at_x += BLOCK_K * stride_xk
        at_w += BLOCK_K * stride_wk
    if PDL:
        gdc_wait()
    r = tl.arange(0, BLOCK_R)
    # With many parts a second stage of this loop would hold twice as many tiles in shared memory as there is.
    for r0 in tl.range(0, R, BLOCK_R, num_stages=1 if PARTS > 2 else 2):
        in_r = r < R - r0
        mask_h = (t < M)[:, None] & in_r[None, :]
        at_h = t[:, None] * R + (r0 + r)[None, :]
        sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for i in tl.static_range(PARTS):  # always in the same order
            sums += tl.load(part + i * M * R + at_h, mask=mask_h, other=0.0)
        ht = (s * sums).to(x.dtype.element_ty)
        if STORE_H:  # noqa: SIM102  h is None where this is False, and must not be looked at
            if tl.program_id(0) == 0:
                tl.store(h + at_h, ht, mask=mask_h)
        if NEED_A:  # the columns of u = x that belong to this program
            at = u + t[:, None].to(tl.int64) * stride_um + n[None, :].to(tl.int64) * stride_un
            ut = tl.load(at, mask=(t < M)[:, None] & (n < N)[None, :], other=0.0)
            at = dA + (r0 + r)[:, None].to(tl.int64) * N + n[None, :]
            tl.store(at, tl.dot(tl.trans(ht), ut).to(dA.dtype.element_ty), mask=in_r[:, None] & (n < N)[None, :])
        at = b + (r0 + r)[:, None].to(tl.int64) * stride_br + n[None, :].to(tl.int64) * stride_bn
        acc = tl.dot(ht, tl.load(at, mask=in_r[:, None] & (n < N)[None, :], other=0.0).to(ht.dtype), acc)
    mask = (t < M)[:, None] & (n < N)[None, :]
    at = t[:, None].to(tl.int64) * N + n[None, :]
    if STORE_INNER:
        tl.store(inner + at, acc.to(inner.dtype.element_ty), mask=mask)
    if SCALE:
        acc = acc * scale_tile(m, c, n, N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


def is_small(x: Tensor) -> bool:
    return x.shape[0] <= LIMIT


@repeatable
def small_forward(
    x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, bias: Tensor | None, s: float, keep_inner: bool,
    config: SmallConfig | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(M, K) (N, K) (r, K) (N, r) -> y, inner (M, N) and s x A^T (M, r). ``config`` overrides the table, for the search."""
    h = x.new_empty((x.shape[0], A.shape[0]))
    y, inner, _ = _small(x, W.T, A.T, B.T, s, config, h=h, m=m, c=c, bias=bias, keep_inner=keep_inner)
    return y, inner, h


@repeatable
def small_backward(
    dz: Tensor, W: Tensor, A: Tensor, B: Tensor, x: Tensor, s: float, need_A: bool, config: SmallConfig | None = None
) -> tuple[Tensor, Tensor | None]:
    """(M, N) (N, K) (r, K) (N, r) (M, K) -> dx = dz W + s dz B A and dA = (s dz B)^T x."""
    dx, _, dA = _small(dz, W, B, A, s, config, u=x if need_A else None)
    return dx, dA


def _small(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, s: float, config: SmallConfig | None, h: Tensor | None = None,
    m: Tensor | None = None, c: Tensor | None = None, bias: Tensor | None = None, keep_inner: bool = False,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(M, K) (K, N) (K, r) (r, N): x w + s x a b, and what comes with it."""
    (M, K), N, r = x.shape, w.shape[1], a.shape[1]
    out = x.new_empty((M, N))
    inner = x.new_empty((M, N)) if keep_inner else None
    dA = None if u is None else b.new_empty((r, N))
    if M == 0 or N == 0:
        return out, inner, None if dA is None else dA.zero_()
    rows, cap = power_of_two(M), capability(x.device)
    # Few slabs of a small rank: K is split as well, so that more than one multiprocessor works and nobody loops for long.
    parts = max(1, min(8 if r <= 64 else 4 if r <= 128 else 2, K // 256))
    part = torch.empty((parts, M, r), device=x.device, dtype=torch.float32)
    pdl = overlaps(x.device)
    span = cdiv(cdiv(K, parts), 16) * 16
    block_k = min(512 if rows < 64 else 128, power_of_two(span))
    stride_ak, stride_ar = a.stride()
    launch(
        _down_kernel, (cdiv(r, 16), parts), (x, a, part, M, K, r, span, *x.stride(), stride_ar, stride_ak),
        (pdl, rows, 16, block_k), 4, 3,
    )  # fmt: skip
    block_n, block_k, warps, stages = config or _config(rows, N, K, w.stride(1) == 1, cap)
    launch(
        _small_kernel, (cdiv(N, block_n),),
        (x, w, part, h, b, out, inner, m, c, bias, u, dA, s, M, N, K, r, *x.stride(), *w.stride(), *b.stride(),
         *((1, 1) if u is None else u.stride())),
        (parts, m is not None, bias is not None, keep_inner, h is not None, u is not None, pdl, rows, block_n, block_k,
         min(64, power_of_two(r))), warps, stages, pdl,
    )  # fmt: skip
    return out, inner, dA
