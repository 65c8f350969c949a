"""The dropout mask inside kernels: the hash of :mod:`fdora.eager.dropout`, bit for bit, in 32-bit words.

keep[t, k] = hash(seed, t, k) >= p * 2**32. Drawn again wherever it is needed, never stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import cdiv, launch
from fdora.triton._repeat import repeatable

BLOCK_M, BLOCK_K = 16, 256


@triton.jit
def _mix(v):
    v = v ^ (v >> 16)
    v = v * 0x21F0AAAD
    v = v ^ (v >> 15)
    v = v * 0x735A2D97
    return v ^ (v >> 15)


@triton.jit
def keep_tile(seed, threshold, t, k):
    """Where the elements (t, k) survive. ``seed`` points at one int64, ``threshold`` is p * 2**32."""
    bits = tl.load(seed)
    key = _mix(bits.to(tl.uint32) ^ _mix((bits >> 32).to(tl.uint32)))
    t = t.to(tl.int64)
    row = _mix((t + 1).to(tl.uint32) ^ key) ^ _mix((t >> 32).to(tl.uint32))
    # Compared as int64: p * 2**32 may not fit 31 bits, and comparing across signs is where compilers differ.
    return _mix(row[:, None] ^ (k.to(tl.uint32) * 0x1E3779B1)[None, :]).to(tl.int64) >= threshold


@triton.jit
def _drop_kernel(
    x, out, seed, threshold, scale, M, K, stride_xm, stride_xk, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (t < M)[:, None] & (k < K)[None, :]
    row = t[:, None].to(tl.int64)
    v = tl.load(x + row * stride_xm + k[None, :].to(tl.int64) * stride_xk, mask=mask).to(tl.float32)
    v = tl.where(keep_tile(seed, threshold, t, k), v * scale, 0.0)
    tl.store(out + row * K + k[None, :], v.to(out.dtype.element_ty), mask=mask)


def threshold(p: float) -> int:
    return int(p * 2**32)


def drop(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """x with its elements zeroed with probability p and the rest scaled by 1 / (1 - p); x itself when seed is None."""
    return x if seed is None else _drop(x, seed, p)


@repeatable
def _drop(x: Tensor, seed: Tensor, p: float) -> Tensor:
    M, K = x.shape
    out = torch.empty((M, K), device=x.device, dtype=x.dtype)
    if M and K:
        launch(
            _drop_kernel, (cdiv(M, BLOCK_M), cdiv(K, BLOCK_K)),
            (x, out, seed, threshold(p), 1 / (1 - p), M, K, *x.stride()), (BLOCK_M, BLOCK_K), 4,
        )  # fmt: skip
    return out
