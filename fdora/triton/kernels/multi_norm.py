"""The row norms of W + s_a B_a A_a of every adapter, each tile of W read once; see fdora/triton/multi_norm.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import rank_of
from fdora.triton.kernels.tile import tile_at, tile_of
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def multi_norm_kernel(
    W, A, B, s, ranks, partial, N, K, R, G, slabs, stride_wn, stride_wk, stride_aa, stride_ar, stride_ak,
    stride_ba, stride_bn, stride_br,
    HAS_RANKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Sums of squares of a tile's rows, (tiles along K, G, N). One loop over the slabs of all adapters: the copies of the next
    adapter's start under the squares of this one."""
    tile_n, tile_k = tile_at(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, GROUP)
    n, k, r = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    at_w = W + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
    at_b = B + n[:, None].to(tl.int64) * stride_bn + r[None, :].to(tl.int64) * stride_br
    at_a = A + r[:, None].to(tl.int64) * stride_ar + k[None, :].to(tl.int64) * stride_ak
    w = tl.load(at_w) if EVEN else tl.load(at_w, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in range(0, G * slabs):
        g, r0 = tl.cast(i // slabs, tl.int64), i % slabs * BLOCK_R
        here_b, here_a = at_b + (g * stride_ba + r0 * stride_br), at_a + (g * stride_aa + r0 * stride_ar)
        if EVEN and not HAS_RANKS:
            b, a = tl.load(here_b), tl.load(here_a)
        else:
            rank = tl.load(ranks + g) if HAS_RANKS else R
            b = tl.load(here_b, mask=(n < N)[:, None] & (r < rank - r0)[None, :], other=0.0)
            a = tl.load(here_a, mask=(k < K)[None, :] & (r < rank - r0)[:, None], other=0.0)
        acc = tl.dot(b, a, acc, input_precision=PRECISION)
        if i % slabs == slabs - 1:
            v = w.to(tl.float32) + tl.load(s + g) * acc
            at = partial + (tile_k.to(tl.int64) * G + g) * N + n
            tl.store(at, tl.sum(v * v, axis=1), mask=n < N)
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)


@triton.jit
def _factor(f, g, G, R, ranks, i, r, limit, stride_a, stride_i, stride_r, HAS_RANKS: tl.constexpr, EVEN: tl.constexpr):
    """Elements (i, r) of adapter g; zeros beyond its rank, and where there is no such adapter."""
    at = f + tl.cast(g, tl.int64) * stride_a + i.to(tl.int64) * stride_i + r.to(tl.int64) * stride_r
    if EVEN and not HAS_RANKS:
        return tl.load(at)
    else:
        return tl.load(at, mask=(i < limit) & (r < rank_of(ranks, g, G, R, HAS_RANKS)), other=0.0)


@triton.jit
def _squares(w, b, a, s):
    v = w.to(tl.float32) + s * tl.dot(b, a)
    return tl.sum(v * v, axis=1)


@triton.jit(launch_metadata=launched)
def strip_norm_kernel(
    W, A, B, s, ranks, partial, N, K, R, G, stride_wn, stride_wk, stride_aa, stride_ar, stride_ak,
    stride_ba, stride_bn, stride_br,
    HAS_RANKS: tl.constexpr, ADAPTERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):
    """The same for 1, 2 or 4 adapters of a small rank: BLOCK_N rows over SPAN columns, (spans, G, N). B stays where it is, and
    STAGES tiles of W and A are under way."""
    g, n = tl.program_id(0) * ADAPTERS, tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, r, kk = tl.program_id(2) * SPAN, tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    nb, rb, ra = n[:, None], r[None, :], r[:, None]
    at_w = W + n[:, None].to(tl.int64) * stride_wn
    b0 = _factor(B, g, G, R, ranks, nb, rb, N, stride_ba, stride_bn, stride_br, HAS_RANKS, EVEN)
    s0, sum0 = tl.load(s + g), tl.zeros((BLOCK_N,), tl.float32)
    if ADAPTERS > 1:
        b1 = _factor(B, g + 1, G, R, ranks, nb, rb, N, stride_ba, stride_bn, stride_br, HAS_RANKS, EVEN)
        s1, sum1 = tl.load(s + g + 1, mask=g + 1 < G, other=0.0), tl.zeros((BLOCK_N,), tl.float32)
    if ADAPTERS > 2:
        b2 = _factor(B, g + 2, G, R, ranks, nb, rb, N, stride_ba, stride_bn, stride_br, HAS_RANKS, EVEN)
        b3 = _factor(B, g + 3, G, R, ranks, nb, rb, N, stride_ba, stride_bn, stride_br, HAS_RANKS, EVEN)
        s2, sum2 = tl.load(s + g + 2, mask=g + 2 < G, other=0.0), tl.zeros((BLOCK_N,), tl.float32)
        s3, sum3 = tl.load(s + g + 3, mask=g + 3 < G, other=0.0), tl.zeros((BLOCK_N,), tl.float32)
    # With num_stages given, W is copied ahead too, though it enters no product.
    for k0 in tl.range(begin, tl.minimum(begin + SPAN, K), BLOCK_K, num_stages=STAGES):
        k = (k0 + kk)[None, :]
        at = at_w + k.to(tl.int64) * stride_wk
        w = tl.load(at) if EVEN else tl.load(at, mask=(n < N)[:, None] & (k < K), other=0.0)
        a0 = _factor(A, g, G, R, ranks, k, ra, K, stride_aa, stride_ak, stride_ar, HAS_RANKS, EVEN)
        sum0 += _squares(w, b0, a0, s0)
        if ADAPTERS > 1:
            a1 = _factor(A, g + 1, G, R, ranks, k, ra, K, stride_aa, stride_ak, stride_ar, HAS_RANKS, EVEN)
            sum1 += _squares(w, b1, a1, s1)
        if ADAPTERS > 2:
            a2 = _factor(A, g + 2, G, R, ranks, k, ra, K, stride_aa, stride_ak, stride_ar, HAS_RANKS, EVEN)
            sum2 += _squares(w, b2, a2, s2)
            a3 = _factor(A, g + 3, G, R, ranks, k, ra, K, stride_aa, stride_ak, stride_ar, HAS_RANKS, EVEN)
            sum3 += _squares(w, b3, a3, s3)
    at = partial + (tl.program_id(2).to(tl.int64) * G + g) * N + n
    tl.store(at, sum0, mask=n < N)
    if ADAPTERS > 1:
        tl.store(at + N, sum1, mask=n < tl.where(g + 1 < G, N, 0))
    if ADAPTERS > 2:
        tl.store(at + 2 * N, sum2, mask=n < tl.where(g + 2 < G, N, 0))
        tl.store(at + 3 * N, sum3, mask=n < tl.where(g + 3 < G, N, 0))


@triton.jit(launch_metadata=launched)
def experts_norm_kernel(
    W,
    A,
    B,
    s,
    partial,
    N,
    K,
    R,
    G,
    stride_we,
    stride_wn,
    stride_wk,
    stride_aa,
    stride_ar,
    stride_ak,
    stride_ba,
    stride_bn,
    stride_br,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The same where each adapter has a W of its own, and a tile one product."""
    g = tl.program_id(1).to(tl.int64)
    _, tile_k, n, _, w, acc = tile_of(
        tl.program_id(0),
        W + g * stride_we,
        A + g * stride_aa,
        B + g * stride_ba,
        N,
        K,
        R,
        stride_wn,
        stride_wk,
        stride_ar,
        stride_ak,
        stride_bn,
        stride_br,
        BLOCK_N,
        BLOCK_K,
        BLOCK_R,
        GROUP,
        EVEN,
        PRECISION,
        False,
    )
    v = w + tl.load(s + g) * acc
    tl.store(partial + (tile_k.to(tl.int64) * G + g) * N + n, tl.sum(v * v, axis=1), mask=n < N)


@triton.jit(launch_metadata=launched)
def multi_root_kernel(partial, c, N, G, strips, first, width, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """The roots of the sums of an adapter's partials, into N columns of c from ``first`` on; c is ``width`` wide."""
    n, t, a = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T), tl.program_id(1)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for t0 in range(0, strips, BLOCK_T):
        at = ((t0 + t).to(tl.int64) * G + a)[:, None] * N + n[None, :]
        acc += tl.sum(tl.load(partial + at, mask=(t0 + t < strips)[:, None] & (n < N)[None, :], other=0.0), axis=0)
    tl.store(c + tl.cast(a, tl.int64) * width + first + n, tl.sqrt_rn(acc), mask=n < N)
