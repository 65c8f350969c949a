"""The row norm of W + s B A for a W of 4- or 8-bit codes, tile by tile, with or without the dense W; see fdora/triton/quant.py.

A decoder turns a tile of codes into float32 in registers. No weight is looked up in memory: that took twice as long as
writing a dense W first (H200). Instructions for each weight, of which a multiprocessor starts 64 a clock (128 where float32):

4 bits   5.6 byte permutes for NF4 and FP4: 16 float32 are four planes of 16 bytes. PRMT looks four nibbles up in 8 bytes at
         once, so a plane takes one for the lower half of the table, one for the upper and one to choose; what was found is
         transposed by two. E2M1 has two planes, and 3.6 do. Elsewhere (AMD, the interpreter) selects, or the bits of a
         float32 put together.
8 bits   int8 1, a conversion; e4m3 the conversion of sm_89, 1.5, or 5 for the bits of a float32 of another bias.

Then one product by the scale, one sum with s B A and one square. A group's scale is decoded once and broadcast. 4-bit codes
lie in pairs: the low-rank tile is split into even and odd columns, which costs nothing where its registers are; interleaving
the weights would. A sum of squares has no order.

Roofs at 8192 x 8192, r = 64 on an H100, none of them measured. NF4 with nested scales: 0.516 bytes a weight, 35 MB, 10 us;
8.6 GFLOP, 11 us; 18 instructions a weight in all (SASS for sm_90), 42 us: starting instructions is what bounds it, up to
r = 240, where the products take as long. Norms of dense bf16 read 134 MB (45 us) after a dequantisation of 170 MB (57 us).
e4m3 and int8: 67 MB, 20 us; 12 instructions a weight, 29 us. With a dense W stored: 134 MB more, 40 us, beside the same.

A guarded norm begins as kernels/norm.py does: its few programs have no tile to walk over where A, B and s are what they were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import beside, byte_scales, byte_weights, nibbles, pair_codes, pair_scales, single_weights
from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.tile import low_rank, tile_at, unscaled
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def _store(dense, w, row, k, inside, pitch, EVEN: tl.constexpr):
    at = dense + row[:, None] * pitch + k[None, :]
    w = w.to(dense.dtype.element_ty)
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=inside)


@triton.jit
def _tiles(
    old_hash, new_hash, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How many there are to do."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K)
    return tl.where(unchanged(old_hash, new_hash, WORDS), 0, tiles)


@triton.jit
def _tile(i, first, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Column of tile i, its rows from ``first`` on and as W has them, its columns, and what is inside."""
    tile_n, tile_k = tile_at(i, N, K, BLOCK_N, BLOCK_K, GROUP)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    row, in_n = (first + n).to(tl.int64), n < N
    inside = in_n[:, None] & (k < K)[None, :]
    return tile_k, n, k, row, in_n, inside


@triton.jit
def _quant4_tile(
    i, codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
    stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    tile_k, n, k, row, in_n, inside = _tile(i, first, N, K, BLOCK_N, BLOCK_K, GROUP)
    IN_TILE: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
    PART: tl.constexpr = BLOCK_K // 2 // IN_TILE
    if PAIRS:
        x = pair_codes(codes, row, tile_k * BLOCK_K, in_n, K, BLOCK_K, 16, EVEN)
        scale = pair_scales(scales, code256, scales2, offset, row, tile_k * BLOCK_K, in_n, groups, GROUP_SIZE, SCALES, IN_TILE)
    else:
        w = single_weights(
            codes, scales, code256, scales2, offset, row, k, in_n, K, groups, TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT
        )
    acc = low_rank(A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION)
    if SCALED:
        acc = unscaled(acc, scale_n, scale_k, n, k, N, K)
    if PAIRS:
        acc_even, acc_odd = tl.split(tl.reshape(acc, (BLOCK_N, IN_TILE, PART, 2)))
        low, high = nibbles(beside(tl.reshape(x, (BLOCK_N, IN_TILE, PART)), acc_even, PTX), TABLE, PTX)
        even, odd = (high if HIGH_FIRST else low) * scale[:, :, None], (low if HIGH_FIRST else high) * scale[:, :, None]
        if not EVEN:
            pairs = tile_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
            whole = tl.reshape(in_n[:, None] & (pairs < K // 2)[None, :], (BLOCK_N, IN_TILE, PART))
            even, odd = tl.where(whole, even, 0.0), tl.where(whole, odd, 0.0)
        v, u = even + s * acc_even, odd + s * acc_odd
        squares = tl.sum(tl.sum(v * v + u * u, axis=2), axis=1)
        if STORE:
            _store(dense, tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K)), row, k, inside, pitch, EVEN)
    else:
        v = w + s * acc
        squares = tl.sum(v * v, axis=1)
        if STORE:
            _store(dense, w, row, k, inside, pitch, EVEN)
    tl.store(partial + tile_k.to(tl.int64) * N + n, squares, mask=in_n)


@triton.jit(launch_metadata=launched)
def quant4_kernel(
    codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, old_hash, new_hash, s, first,
    N, K, R, groups, stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N rows from ``first`` on: B, scale_n and partial begin there, W and what is stored of it do not."""
    if GUARDED:
        for i in range(tl.program_id(0), _tiles(old_hash, new_hash, N, K, BLOCK_N, BLOCK_K, WORDS, PDL), tl.num_programs(0)):
            _quant4_tile(
                i, codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, s, first,
                N, K, R, groups, stride_ar, stride_ak, stride_bn, stride_br,
                TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, STORE,
                BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, SCALED,
            )  # fmt: skip
    else:
        _quant4_tile(
            tl.program_id(0), codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, s, first,
            N, K, R, groups, stride_ar, stride_ak, stride_bn, stride_br,
            TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, STORE,
            BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, SCALED,
        )  # fmt: skip


@triton.jit
def _quant8_tile(
    i, codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
    stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    tile_k, n, k, row, in_n, inside = _tile(i, first, N, K, BLOCK_N, BLOCK_K, GROUP)
    at = codes + row[:, None] * stride_cn + k[None, :].to(tl.int64) * stride_ck
    x = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    scale = byte_scales(scales, row, k, tile_k * BLOCK_K, in_n, inside, groups, MODE, BN, BK, BLOCK_K)
    acc = low_rank(A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION)
    if SCALED:
        acc = unscaled(acc, scale_n, scale_k, n, k, N, K)
    x = beside(x, acc, PTX)
    w = byte_weights(x, scale, CODE, BY_BITS)
    if not EVEN:
        w = tl.where(inside, w, 0.0)
    v = w + s * acc
    tl.store(partial + tile_k.to(tl.int64) * N + n, tl.sum(v * v, axis=1), mask=in_n)
    if STORE:
        _store(dense, w, row, k, inside, pitch, EVEN)


@triton.jit(launch_metadata=launched)
def quant8_kernel(
    codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, old_hash, new_hash, s, first, N, K, R, groups,
    stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N rows from ``first`` on, as above. e4m3 codes come as bytes: Triton has no float8 below sm_89 (BY_BITS)."""
    if GUARDED:
        for i in range(tl.program_id(0), _tiles(old_hash, new_hash, N, K, BLOCK_N, BLOCK_K, WORDS, PDL), tl.num_programs(0)):
            _quant8_tile(
                i, codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
                stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br, CODE, BY_BITS, MODE, BN, BK, PTX, STORE,
                BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, SCALED,
            )  # fmt: skip
    else:
        _quant8_tile(
            tl.program_id(0), codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
            stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br, CODE, BY_BITS, MODE, BN, BK, PTX, STORE,
            BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, SCALED,
        )  # fmt: skip
