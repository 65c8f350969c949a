"""The row norm of W + s B A for a W of 4- or 8-bit codes, tile by tile, with or without the dense W; see fdora/triton/quant.py.

A decoder turns a tile of codes into float32 in registers. No weight is looked up in memory: that took twice as long as
writing a dense W first (H200). Instructions for each weight, of which a multiprocessor starts 64 a clock (128 where float32):

4 bits   a shift and a shuffle. A lane holds the float32 of code lane % 16, and SHFL, which reads four bits of its index, takes
         one from its half of the warp: another unit than those that compute, 32 lanes a clock for a multiprocessor. Or 5.6
         byte permutes for NF4 and FP4 (kernels/dequantize.py): 16 float32 are four planes of 16 bytes. PRMT looks four
         nibbles up in 8 bytes at once, so a plane takes one for the lower half of the table, one for the upper and one to
         choose; what was found is transposed by two. E2M1 has two planes, and 3.6 do. Elsewhere (AMD, the interpreter)
         selects, or the bits of a float32 put together.
8 bits   int8 1, a conversion; e4m3 the conversion of sm_89, 1.5, or 5 for the bits of a float32 of another bias.

Then one product by the scale, one sum with s B A and one square. A group's scale is decoded once and broadcast. 4-bit codes
lie in pairs: the low-rank tile is split into even and odd columns, which costs nothing where its registers are; interleaving
the weights would. A sum of squares has no order.

Roofs at 8192 x 8192, r = 64 on an H100, none of them measured. NF4 with nested scales: 0.516 bytes a weight, 35 MB, 10 us;
8.6 GFLOP, 11 us; 11 instructions a weight in all (SASS for sm_90, 10 with 4 warps), 26 us: starting instructions is what bounds
it, up to r = 150, where the products take as long. By permutes and a tile to a program it was 21. Norms of dense bf16 read
134 MB (45 us) after a dequantisation of 170 MB (57 us).
e4m3 and int8: 67 MB, 20 us; 12 instructions a weight, 29 us. With a dense W stored: 134 MB more, 40 us, beside the same.

A guarded norm begins as kernels/norm.py does: its few programs have no tile to walk over where A, B and s are what they were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import (
    beside,
    nibbles,
    pair_codes,
    pair_groups,
    scale_from,
    scale_terms,
    single_weights,
)
from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.tile import low_rank, low_rank_tma, slab_of_A, slab_of_B, tile_at, unscaled
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def store_w(dense, w, row, k, inside, pitch, EVEN: tl.constexpr):
    at = dense + row[:, None] * pitch + k[None, :]
    w = w.to(dense.dtype.element_ty)
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=inside)


@triton.jit
def runs_of(
    old_hash, new_hash, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """How many there are to do."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    runs = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K * RUN)
    if GUARDED:
        runs = tl.where(unchanged(old_hash, new_hash, WORDS), 0, runs)
    return runs


@triton.jit
def run_at(i, first, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr):
    """Number i: its column among the partials, its tiles of K, its rows from ``first`` on and as W has them."""
    tile_n, run = tile_at(i, N, K, BLOCK_N, BLOCK_K * RUN, GROUP)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = run * RUN
    end = begin + 1 if RUN == 1 else min(begin + RUN, tl.cdiv(K, BLOCK_K))
    return run, begin, end, tile_n * BLOCK_N, n, (first + n).to(tl.int64), n < N


@triton.jit
def product_of(
    A, B, b, n, k, first_n, first_k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, scale_n, scale_k,
    BLOCK_R: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ONE_SLAB: tl.constexpr,
    SCALED: tl.constexpr,
):
    """B A. ``b``: the only slab of B, if it is one."""
    if TMA:
        acc = low_rank_tma(A, B, first_n, first_k, R, n.shape[0], k.shape[0], BLOCK_R)
    elif ONE_SLAB:
        a = slab_of_A(A, k, K, R, stride_ar, stride_ak, BLOCK_R, EVEN)
        acc = tl.dot(b, a, input_precision=PRECISION)
    else:
        acc = low_rank(A, B, n, k, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION)
    if SCALED:
        acc = unscaled(acc, scale_n, scale_k, n, k, N, K)
    return acc


@triton.jit
def _halves(t, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """The first and the second half of the columns."""
    return tl.split(tl.permute(tl.reshape(t, (BLOCK_N, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _squares_of_pairs(
    acc, x, scale, s, TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr,
    IN_TILE: tl.constexpr, PART: tl.constexpr,
):
    acc_even, acc_odd = tl.split(tl.reshape(acc, (BLOCK_N, IN_TILE, PART, 2)))
    low, high = nibbles(beside(tl.reshape(x, (BLOCK_N, IN_TILE, PART)), acc_even, PTX), TABLE, PTX)
    v = (high if HIGH_FIRST else low) * scale[:, :, None] + s * acc_even
    u = (low if HIGH_FIRST else high) * scale[:, :, None] + s * acc_odd
    return tl.sum(tl.sum(v * v + u * u, axis=2), axis=1)


@triton.jit
def _squares4(
    tile_k, x, scale, b, first_n, n, row, in_n,
    codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, dense, pitch, s, N, K, R, groups,
    stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, ONE_SLAB: tl.constexpr, SCALED: tl.constexpr,
):
    """Of a tile, along K. ``x`` and ``scale``: its codes and their scales, in PAIRS."""
    IN_TILE: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
    PART: tl.constexpr = BLOCK_K // 2 // IN_TILE
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    if not PAIRS:
        w = single_weights(
            codes, scales, code256, scales2, offset, row, k, in_n, K, groups, TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT
        )
    acc = product_of(
        A, B, b, n, k, first_n, tile_k * BLOCK_K, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, scale_n, scale_k,
        BLOCK_R, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
    )
    inside = in_n[:, None] & (k < K)[None, :]
    if PAIRS and TMA and EVEN and IN_TILE > 1:
        left, right = _halves(acc, BLOCK_N, BLOCK_K)
        x_left, x_right = _halves(x, BLOCK_N, BLOCK_K // 2)
        scale_left, scale_right = _halves(scale, BLOCK_N, IN_TILE)
        squares = _squares_of_pairs(left, x_left, scale_left, s, TABLE, HIGH_FIRST, PTX, BLOCK_N, IN_TILE // 2, PART)
        squares += _squares_of_pairs(right, x_right, scale_right, s, TABLE, HIGH_FIRST, PTX, BLOCK_N, IN_TILE // 2, PART)
    elif PAIRS:
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
            store_w(dense, tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K)), row, k, inside, pitch, EVEN)
    else:
        v = w + s * acc
        squares = tl.sum(v * v, axis=1)
        if STORE:
            store_w(dense, w, row, k, inside, pitch, EVEN)
    return squares


@triton.jit
def _quant4_run(
    i, codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
    stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ONE_SLAB: tl.constexpr, SCALED: tl.constexpr,
):
    run, begin, end, first_n, n, row, in_n = run_at(i, first, N, K, BLOCK_N, BLOCK_K, RUN, GROUP)
    IN_TILE: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
    b = slab_of_B(B, n, N, R, stride_bn, stride_br, BLOCK_R, EVEN) if ONE_SLAB and not TMA else None
    if PAIRS:
        # Codes come a tile ahead, scales two: a nested one takes two loads, one after the other. The last tile's, again.
        x = pair_codes(codes, row, begin * BLOCK_K, in_n, K, BLOCK_K, 16, EVEN)
        at, here = pair_groups(row, begin * BLOCK_K, in_n, groups, GROUP_SIZE, IN_TILE)
        stored = tl.load(scales + at, mask=here, other=0)
        value, second = scale_terms(stored, code256, scales2, at, here, SCALES)
    else:
        x, value, second, here = None, None, None, None
    if RUN == 1:
        scale = scale_from(value, second, code256, offset, here, SCALES) if PAIRS else None
        squares = _squares4(
            begin, x, scale, b, first_n, n, row, in_n,
            codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, dense, pitch, s, N, K, R, groups,
            stride_ar, stride_ak, stride_bn, stride_br, TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, STORE,
            BLOCK_N, BLOCK_K, BLOCK_R, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
        )
    else:
        squares = tl.zeros((BLOCK_N,), tl.float32)
        at, there = pair_groups(row, min(begin + 1, end - 1) * BLOCK_K, in_n, groups, GROUP_SIZE, IN_TILE)
        stored = tl.load(scales + at, mask=there, other=0)
        for tile_k in range(begin, end):
            _, here = pair_groups(row, tile_k * BLOCK_K, in_n, groups, GROUP_SIZE, IN_TILE)
            scale = scale_from(value, second, code256, offset, here, SCALES)
            x_next = pair_codes(codes, row, min(tile_k + 1, end - 1) * BLOCK_K, in_n, K, BLOCK_K, 16, EVEN)
            value, second = scale_terms(stored, code256, scales2, at, there, SCALES)
            at, there = pair_groups(row, min(tile_k + 2, end - 1) * BLOCK_K, in_n, groups, GROUP_SIZE, IN_TILE)
            stored = tl.load(scales + at, mask=there, other=0)
            squares += _squares4(
                tile_k, x, scale, b, first_n, n, row, in_n,
                codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, dense, pitch, s, N, K, R, groups,
                stride_ar, stride_ak, stride_bn, stride_br, TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, STORE,
                BLOCK_N, BLOCK_K, BLOCK_R, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
            )
            x = x_next
    tl.store(partial + run.to(tl.int64) * N + n, squares, mask=in_n)


@triton.jit(launch_metadata=launched)
def quant4_kernel(
    codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, old_hash, new_hash, s, first,
    N, K, R, groups, stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, FLAT: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ONE_SLAB: tl.constexpr, SCALED: tl.constexpr,
    GUARDED: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """N rows from ``first`` on: B, scale_n and partial begin there, W and what is stored of it do not."""
    if GUARDED or TMA:  # flattened, the copies of the next tile start under the last products of this one
        runs = runs_of(old_hash, new_hash, N, K, BLOCK_N, BLOCK_K, RUN, GUARDED, WORDS, PDL)
        for i in tl.range(tl.program_id(0), runs, tl.num_programs(0), flatten=TMA):
            _quant4_run(
                i, codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, s, first,
                N, K, R, groups, stride_ar, stride_ak, stride_bn, stride_br,
                TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, STORE,
                BLOCK_N, BLOCK_K, BLOCK_R, RUN, GROUP, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
            )
    else:
        _quant4_run(
            tl.program_id(0), codes, scales, code256, scales2, offset, A, B, scale_n, scale_k, partial, dense, pitch, s, first,
            N, K, R, groups, stride_ar, stride_ak, stride_bn, stride_br,
            TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, FLAT, PAIRS, PTX, STORE,
            BLOCK_N, BLOCK_K, BLOCK_R, RUN, GROUP, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
        )
