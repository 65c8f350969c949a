"""Copies for many adapters: tokens into sorted order and back, a bank as one matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.dropout import keep_rows
from fdora.triton.kernels.multi import bounds_of
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def rows_kernel(x, order, out, M, N, stride_x, SCATTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[t] = x[order[t]]; SCATTER: out[order[t]] = x[t]."""
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (t < M)[:, None] & (n < N)[None, :]
    there, here = tl.load(order + t, mask=t < M, other=0)[:, None], t[:, None].to(tl.int64)
    if SCATTER:
        tl.store(out + there * N + n[None, :], tl.load(x + here * stride_x + n[None, :], mask=mask), mask=mask)
    else:
        tl.store(out + here * N + n[None, :], tl.load(x + there * stride_x + n[None, :], mask=mask), mask=mask)


@triton.jit(launch_metadata=launched)
def bank_kernel(
    x, out, P, Q, height, pitch, stride_xa, stride_xp, stride_xq, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """(G, P, Q) -> (G, height, Q), zeros below, rows ``pitch`` apart."""
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    a = tl.program_id(2).to(tl.int64)
    at = x + a * stride_xa + p[:, None].to(tl.int64) * stride_xp + q[None, :].to(tl.int64) * stride_xq
    t = tl.load(at, mask=(p < P)[:, None] & (q < Q)[None, :], other=0.0)
    at = out + (a * height + p[:, None]) * pitch + q[None, :]
    tl.store(at, t.to(out.dtype.element_ty), mask=(p < height)[:, None] & (q < Q)[None, :])


@triton.jit
def keep_of_segments(seed, threshold, ids, t, k, offsets, M, G):
    """Where the elements (t, k) survive: a token counts from the start of its segment, under the seed of its adapter."""
    a = tl.load(ids + t, mask=t < M, other=0)
    lo, _ = bounds_of(offsets, a, G, M)
    return keep_rows(tl.load(seed + a, mask=a < G, other=0), threshold, t - lo, k)


@triton.jit(launch_metadata=launched)
def multi_drop_kernel(
    x, out, seed, offsets, ids, threshold, scale, M, G, K, stride_xm, stride_xk, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (t < M)[:, None] & (k < K)[None, :]
    row = t[:, None].to(tl.int64)
    v = tl.load(x + row * stride_xm + k[None, :].to(tl.int64) * stride_xk, mask=mask).to(tl.float32)
    v = tl.where(keep_of_segments(seed, threshold, ids, t, k, offsets, M, G), v * scale, 0.0)
    tl.store(out + row * K + k[None, :], v.to(out.dtype.element_ty), mask=mask)
