"""A dense W out of its codes, tile by tile; see fdora/triton/dequantize.py.

A thread reads as many codes next to each other as make the 16 bytes that it writes, so the weights leave from the registers
in which they were decoded: a wider read would send all of them through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import byte_scales, byte_weights, nibbles, pair_codes, pair_scales, single_weights
from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.scale import dot_rows, over_tokens, store_gradients
from fdora.triton.runtime.cost import launched


@triton.jit
def _rows(i, N, BLOCK_N: tl.constexpr):
    n = i.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return n, n < N


@triton.jit
def _store(out, w, m, c, n, k, first, N, inside, pitch, BY_G: tl.constexpr, EVEN: tl.constexpr):
    at = out + n[:, None] * pitch + (k - first)[None, :]
    if BY_G:
        w *= g_tile(m, c, n, N)[:, None]
    w = w.to(out.dtype.element_ty)
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=inside)


@triton.jit
def _decode4(
    codes, scales, code256, scales2, offset, n, in_n, first_k, k, K, groups,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
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
    return w


@triton.jit
def _decode8(
    codes, scales, n, in_n, first_k, k, inside, groups, stride_cn, stride_ck,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr,
    BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
    at = tl.max_contiguous(codes + n[:, None] * stride_cn + k[None, :].to(tl.int64) * stride_ck, (1, VECTOR))
    x = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    scale = byte_scales(scales, n, k, first_k, in_n, inside, groups, MODE, BN, BK, BLOCK_K)
    return byte_weights(x, scale, CODE, BY_BITS)


@triton.jit(launch_metadata=launched)
def dequantize4_kernel(
    codes, scales, code256, scales2, offset, m, c, out, N, K, groups, first, last, pitch,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
    BY_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
    """Columns from ``first`` to ``last``, a program for each tile, row by row."""
    tiles = tl.cdiv(last - first, BLOCK_K)
    n, in_n = _rows(tl.program_id(0) // tiles, N, BLOCK_N)
    first_k = first + (tl.program_id(0) % tiles) * BLOCK_K
    k = first_k + tl.arange(0, BLOCK_K)
    w = _decode4(
        codes, scales, code256, scales2, offset, n, in_n, first_k, k, K, groups,
        TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, BLOCK_N, BLOCK_K, VECTOR, EVEN,
    )
    _store(out, w, m, c, n, k, first, N, in_n[:, None] & (k < last)[None, :], pitch, BY_G, EVEN)


@triton.jit(launch_metadata=launched)
def dequantize8_kernel(
    codes, scales, m, c, out, N, K, groups, first, last, pitch, stride_cn, stride_ck,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr,
    BY_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
    """As that of 4 bits."""
    tiles = tl.cdiv(last - first, BLOCK_K)
    n, in_n = _rows(tl.program_id(0) // tiles, N, BLOCK_N)
    first_k = first + (tl.program_id(0) % tiles) * BLOCK_K
    k = first_k + tl.arange(0, BLOCK_K)
    inside = in_n[:, None] & (k < last)[None, :]
    w = _decode8(
        codes, scales, n, in_n, first_k, k, inside, groups, stride_cn, stride_ck, CODE, BY_BITS, MODE, BN, BK, PTX,
        BLOCK_K, VECTOR, EVEN,
    )
    _store(out, w, m, c, n, k, first, N, inside, pitch, BY_G, EVEN)


@triton.jit
def _lost(m, c, n, in_n, N, tiny):
    """g of these rows, and which of them left nothing in y."""
    g = g_tile(m, c, n, N)
    return g, (tl.abs(g) < tiny) & in_n


@triton.jit(launch_metadata=launched)
def lost4_kernel(
    codes, scales, code256, scales2, offset, dy, x, h, b, m, c, dm, dc, M, N, K, R, groups, tiny,
    stride_dy, stride_xm, stride_xk, stride_hm, stride_hr, stride_bn, stride_br, NEED_M: tl.constexpr, NEED_C: tl.constexpr,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
    """The gradients of m and c of rows whose g is nothing or nearly so, from the products: dg_n = W_n (dy^T x)_n +
    B_n (dy^T h)_n. A program for each BLOCK_N rows, which ends at once where there is no such row."""
    n, in_n = _rows(tl.program_id(0), N, BLOCK_N)
    g, lost = _lost(m, c, n, in_n, N, tiny)
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        dg = dot_rows(dy, h, b, n, N, M, R, stride_dy, stride_hm, stride_hr, stride_bn, stride_br, BLOCK_N)
        for first_k in range(0, K, BLOCK_K):
            k = first_k + tl.arange(0, BLOCK_K)
            w = _decode4(
                codes, scales, code256, scales2, offset, n, in_n, first_k, k, K, groups,
                TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, BLOCK_N, BLOCK_K, VECTOR, EVEN,
            )
            dg += tl.sum(over_tokens(dy, x, n, k, N, M, K, stride_dy, stride_xm, stride_xk) * w, axis=1)
        store_gradients(dg, g, c, dm, dc, n, lost, N, NEED_M, NEED_C)


@triton.jit(launch_metadata=launched)
def lost8_kernel(
    codes, scales, dy, x, h, b, m, c, dm, dc, M, N, K, R, groups, tiny,
    stride_dy, stride_xm, stride_xk, stride_hm, stride_hr, stride_bn, stride_br, stride_cn, stride_ck,
    NEED_M: tl.constexpr, NEED_C: tl.constexpr,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):
    """As that of 4 bits."""
    n, in_n = _rows(tl.program_id(0), N, BLOCK_N)
    g, lost = _lost(m, c, n, in_n, N, tiny)
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        dg = dot_rows(dy, h, b, n, N, M, R, stride_dy, stride_hm, stride_hr, stride_bn, stride_br, BLOCK_N)
        for first_k in range(0, K, BLOCK_K):
            k = first_k + tl.arange(0, BLOCK_K)
            inside = in_n[:, None] & (k < K)[None, :]
            w = _decode8(
                codes, scales, n, in_n, first_k, k, inside, groups, stride_cn, stride_ck, CODE, BY_BITS, MODE, BN, BK, PTX,
                BLOCK_K, VECTOR, EVEN,
            )
            dg += tl.sum(over_tokens(dy, x, n, k, N, M, K, stride_dy, stride_xm, stride_xk) * w, axis=1)
        store_gradients(dg, g, c, dm, dc, n, lost, N, NEED_M, NEED_C)
