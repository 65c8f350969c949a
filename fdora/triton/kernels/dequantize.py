"""A dense W out of its codes, tile by tile; see fdora/triton/dequantize.py.

A thread reads as many codes next to each other as make the 16 bytes that it writes, so the weights leave from the registers
in which they were decoded: a wider read would send all of them through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import byte_scales, byte_weights, nibbles, pair_codes, pair_scales, single_weights
from fdora.triton.runtime.cost import launched


@triton.jit
def _tile(N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Row by row: its first column, its rows, its columns, and what is inside."""
    tiles = tl.cdiv(K, BLOCK_K)
    n = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = (tl.program_id(0) % tiles) * BLOCK_K
    k = first_k + tl.arange(0, BLOCK_K)
    return first_k, n, k, n < N, (n < N)[:, None] & (k < K)[None, :]


@triton.jit
def _store(out, w, n, k, inside, pitch, EVEN: tl.constexpr):
    at = out + n[:, None] * pitch + k[None, :]
    w = w.to(out.dtype.element_ty)
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=inside)


@triton.jit(launch_metadata=launched)
def dequantize4_kernel(
    codes, scales, code256, scales2, offset, out, N, K, groups, pitch,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    first_k, n, k, in_n, inside = _tile(N, K, BLOCK_N, BLOCK_K)
    if PAIRS:
        IN_TILE: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
        PART: tl.constexpr = BLOCK_K // 2 // IN_TILE
        x = pair_codes(codes, n, first_k, in_n, K, BLOCK_K, VECTOR, EVEN)
        scale = pair_scales(scales, code256, scales2, offset, n, first_k, in_n, groups, GROUP_SIZE, SCALES, IN_TILE)
        low, high = nibbles(tl.reshape(x, (BLOCK_N, IN_TILE, PART)), TABLE, PTX)
        even, odd = (high if HIGH_FIRST else low) * scale[:, :, None], (low if HIGH_FIRST else high) * scale[:, :, None]
        w = tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K))
    else:
        w = single_weights(
            codes, scales, code256, scales2, offset, n, k, in_n, K, groups, TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT
        )
    _store(out, w, n, k, inside, pitch, EVEN)


@triton.jit(launch_metadata=launched)
def dequantize8_kernel(
    codes, scales, out, N, K, groups, pitch, stride_cn, stride_ck,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    first_k, n, k, in_n, inside = _tile(N, K, BLOCK_N, BLOCK_K)
    at = tl.max_contiguous(codes + n[:, None] * stride_cn + k[None, :].to(tl.int64) * stride_ck, (1, VECTOR))
    x = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    scale = byte_scales(scales, n, k, first_k, in_n, inside, groups, MODE, BN, BK, BLOCK_K)
    _store(out, byte_weights(x, scale, CODE, BY_BITS), n, k, inside, pitch, EVEN)
