"""The dropout mask: the hash of fdora/eager/dropout.py, bit for bit, in 32-bit words.

keep[t, k] = hash(seed, t, k) >= p * 2**32. Drawn again wherever it is needed, never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import Matrix, addresses, block_on, store, within
from fdora.triton.runtime.cost import ANY_LENGTH, kernel


@triton.jit
def _mix(v):
    v = v ^ (v >> 16)
    v = v * 0x21F0AAAD
    v = v ^ (v >> 15)
    v = v * 0x735A2D97
    return v ^ (v >> 15)


@triton.jit
def keep_tile(seed, threshold, t, k, ORIGIN: tl.constexpr):
    """Where the elements (t, k) survive. ``seed`` points at one int64, ``threshold`` is p * 2**32.

    ``ORIGIN``: behind the seed stands where in a larger matrix (0, 0) is.
    """
    t = t.to(tl.int64)
    if ORIGIN:
        t += tl.load(seed + 1)
        k = k.to(tl.uint32) + tl.load(seed + 2).to(tl.uint32)
    return keep_rows(tl.load(seed), threshold, t, k)


@triton.jit
def keep_rows(bits, threshold, t, k):
    """The same for a seed that is loaded."""
    return keep_keyed(key_of(bits, t)[:, None], threshold, k[None, :])


@triton.jit
def key_of(bits, t):
    """What the hash has of a token."""
    key = _mix(bits.to(tl.uint32) ^ _mix((bits >> 32).to(tl.uint32)))
    t = t.to(tl.int64)
    return _mix((t + 1).to(tl.uint32) ^ key) ^ _mix((t >> 32).to(tl.uint32))


@triton.jit
def keep_keyed(key, threshold, k):
    """Where the elements k of tokens with these keys survive; each of the three one number, a column or a row."""
    v = (key ^ (k.to(tl.uint32) * 0x1E3779B1)) * 0x21F0AAAD
    # Both without a sign: p * 2**32 may not fit 31 bits, and comparing across signs is where compilers differ.
    return (v ^ (v >> 16)) * 0x735A2D97 >= tl.cast(threshold, tl.uint32)


@kernel("x out", **ANY_LENGTH)
def drop_kernel(
    x, out, seed, threshold, scale, M, K, stride_xm, stride_xk,
    ACCUMULATE: tl.constexpr, ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    t, k = block_on(0, BLOCK_M), block_on(1, BLOCK_K)
    mask, out = within(t, k, M, K), Matrix(out, K, None)
    keep = keep_tile(seed, threshold, t, k, ORIGIN)
    v = tl.load(addresses(Matrix(x, stride_xm, stride_xk), t, k), mask=mask).to(tl.float32)
    v = tl.where(keep, v * scale, 0.0)
    if ACCUMULATE:
        v += tl.load(addresses(out, t, k), mask=mask).to(tl.float32)
    store(v, out, t, k, M, K)
