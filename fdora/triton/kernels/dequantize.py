"""A dense W out of its codes, tile by tile; see fdora/triton/dequantize.py.

A thread reads as many codes next to each other as make the 16 bytes that it writes, so the weights leave from the registers
in which they were decoded: a wider read would send all of them through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import byte_scales, byte_weights, nibbles, pair_codes, pair_scales, single_weights
from fdora.triton.kernels.g import g_tile
from fdora.triton.runtime.cost import launched


@triton.jit
def _rows(i, N, BLOCK_N: tl.constexpr):
    n = i.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return n, n < N


@triton.jit
def _lost(m, c, n, N, tiny, tiles):
    """As many of these tiles as are to be decoded: none, unless g of a row is nothing or nearly so."""
    lost = (tl.abs(g_tile(m, c, n, N)) < tiny) & (n < N)
    return tl.where(tl.max(lost.to(tl.int32), axis=0) > 0, tiles, 0)


@triton.jit
def _store(out, w, m, c, n, k, N, inside, pitch, BY_G: tl.constexpr, EVEN: tl.constexpr):
    at = out + n[:, None] * pitch + k[None, :]
    if BY_G:
        w *= g_tile(m, c, n, N)[:, None]
    w = w.to(out.dtype.element_ty)
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=inside)


@triton.jit
def _decode4(
    codes, scales, code256, scales2, offset, m, c, out, n, in_n, first_k, N, K, groups, pitch,
    BY_G: tl.constexpr, TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr,
    FLAT: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    k = first_k + tl.arange(0, BLOCK_K)
    inside = in_n[:, None] & (k < K)[None, :]
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
    _store(out, w, m, c, n, k, N, inside, pitch, BY_G, EVEN)


@triton.jit(launch_metadata=launched)
def dequantize4_kernel(
    codes, scales, code256, scales2, offset, m, c, out, N, K, groups, pitch, tiny, BY_G: tl.constexpr, LOST: tl.constexpr,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A program for each tile, row by row; of the lost rows alone (LOST), one for each BLOCK_N rows."""
    tiles = tl.cdiv(K, BLOCK_K)
    if LOST:
        n, in_n = _rows(tl.program_id(0), N, BLOCK_N)
        for i in range(_lost(m, c, n, N, tiny, tiles)):
            _decode4(
                codes, scales, code256, scales2, offset, m, c, out, n, in_n, i * BLOCK_K, N, K, groups, pitch, False,
                TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, BLOCK_N, BLOCK_K, VECTOR, EVEN,
            )  # fmt: skip
    else:
        n, in_n = _rows(tl.program_id(0) // tiles, N, BLOCK_N)
        _decode4(
            codes, scales, code256, scales2, offset, m, c, out, n, in_n, (tl.program_id(0) % tiles) * BLOCK_K, N, K, groups,
            pitch, BY_G, TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, BLOCK_N, BLOCK_K, VECTOR, EVEN,
        )  # fmt: skip


@triton.jit
def _decode8(
    codes, scales, m, c, out, n, in_n, first_k, N, K, groups, pitch, stride_cn, stride_ck,
    BY_G: tl.constexpr, CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    k = first_k + tl.arange(0, BLOCK_K)
    inside = in_n[:, None] & (k < K)[None, :]
    at = tl.max_contiguous(codes + n[:, None] * stride_cn + k[None, :].to(tl.int64) * stride_ck, (1, VECTOR))
    x = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    scale = byte_scales(scales, n, k, first_k, in_n, inside, groups, MODE, BN, BK, BLOCK_K)
    _store(out, byte_weights(x, scale, CODE, BY_BITS), m, c, n, k, N, inside, pitch, BY_G, EVEN)


@triton.jit(launch_metadata=launched)
def dequantize8_kernel(
    codes, scales, m, c, out, N, K, groups, pitch, stride_cn, stride_ck, tiny, BY_G: tl.constexpr, LOST: tl.constexpr,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """As that of 4 bits."""
    tiles = tl.cdiv(K, BLOCK_K)
    if LOST:
        n, in_n = _rows(tl.program_id(0), N, BLOCK_N)
        for i in range(_lost(m, c, n, N, tiny, tiles)):
            _decode8(
                codes, scales, m, c, out, n, in_n, i * BLOCK_K, N, K, groups, pitch, stride_cn, stride_ck, False,
                CODE, BY_BITS, MODE, BN, BK, PTX, BLOCK_N, BLOCK_K, VECTOR, EVEN,
            )  # fmt: skip
    else:
        n, in_n = _rows(tl.program_id(0) // tiles, N, BLOCK_N)
        _decode8(
            codes, scales, m, c, out, n, in_n, (tl.program_id(0) % tiles) * BLOCK_K, N, K, groups, pitch, stride_cn, stride_ck,
            BY_G, CODE, BY_BITS, MODE, BN, BK, PTX, BLOCK_N, BLOCK_K, VECTOR, EVEN,
        )  # fmt: skip
