"""The row norms of W + s_a B_a A_a of every adapter, each tile of W read once; see fdora/triton/multi_norm.py."""

from __future__ import annotations

import triton
import triton.language as tl

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
