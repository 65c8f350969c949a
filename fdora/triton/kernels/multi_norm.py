"""The row norms of W + s_a B_a A_a of every adapter, each tile of W read once; see fdora/triton/multi_norm.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import low_rank, tile_at
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def multi_norm_kernel(
    W, A, B, s, ranks, partial, N, K, R, G,
    stride_wn, stride_wk, stride_aa, stride_ar, stride_ak, stride_ba, stride_bn, stride_br,
    HAS_RANKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of squares of a tile's rows, (tiles along K, G, N)."""
    tile_n, tile_k = tile_at(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, GROUP)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    at_w = W + n[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
    w = tl.load(at_w) if EVEN else tl.load(at_w, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    for a in range(0, G):
        rank = tl.load(ranks + a) if HAS_RANKS else R
        acc = low_rank(
            A + tl.cast(a, tl.int64) * stride_aa, B + tl.cast(a, tl.int64) * stride_ba, n, k, N, K, rank, stride_ar, stride_ak,
            stride_bn, stride_br, BLOCK_R, EVEN and not HAS_RANKS, PRECISION,
        )  # fmt: skip
        v = w.to(tl.float32) + tl.load(s + a) * acc
        at = partial + (tile_k.to(tl.int64) * G + a) * N + n
        tl.store(at, tl.sum(v * v, axis=1), mask=n < N)


@triton.jit(launch_metadata=launched)
def multi_root_kernel(partial, c, N, G, strips, first, width, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """The roots of the sums of an adapter's partials, into N columns of c from ``first`` on; c is ``width`` wide."""
    n, t, a = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T), tl.program_id(1)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for t0 in range(0, strips, BLOCK_T):
        at = ((t0 + t).to(tl.int64) * G + a)[:, None] * N + n[None, :]
        acc += tl.sum(tl.load(partial + at, mask=(t0 + t < strips)[:, None] & (n < N)[None, :], other=0.0), axis=0)
    tl.store(c + tl.cast(a, tl.int64) * width + first + n, tl.sqrt_rn(acc), mask=n < N)
