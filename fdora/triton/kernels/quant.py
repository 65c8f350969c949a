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
    Codes,
    beside,
    byte_scales,
    byte_weights,
    int_weights,
    pair_codes,
    pair_groups,
    pair_weights,
    scale_from,
    scale_terms,
    single_weights,
    tile_bytes,
    tile_scales,
    tile_words,
)
from fdora.triton.kernels.norm import Run, Sums, product_of, squares_of_run, walk
from fdora.triton.kernels.tile import Blocks, LowRank, Matrix, addresses, both, halves
from fdora.triton.runtime.cost import kernel


@triton.jit
def _store(w, rows, first_k, K, to, T: tl.constexpr):
    """w to the dense W."""
    k = first_k + tl.arange(0, T.K)
    at = addresses(Matrix(to.dense, to.pitch, None), rows.of_W, k)
    w = w.to(to.dense.dtype.element_ty)
    if T.EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=both(rows.inside, k < K))


@triton.jit
def read_codes8(W, before, rows, first_k, then, K, HOW: tl.constexpr, T: tl.constexpr):
    """Codes of a tile and their scales."""
    k = first_k + tl.arange(0, T.K)
    inside = both(rows.inside, k < K)
    if HOW.SCALES == "group":
        scale, zero = tile_scales(W, rows.of_W, rows.inside, first_k, K, HOW, T)
        return tile_words(W, rows.of_W, rows.inside, first_k, K, HOW, T, 16), scale, zero
    else:
        at = addresses(Matrix(W.codes, W.row, W.col), rows.of_W, k)
        x = tl.load(at) if T.EVEN else tl.load(at, mask=inside, other=0)
        return x, byte_scales(W, rows.of_W, k, first_k, rows.inside, inside, HOW, T.K)


@triton.jit
def codes8_tile(W, read, low, b, s, to, rows, first_k, N, K, HOW: tl.constexpr, T: tl.constexpr):
    acc = product_of(low, b, rows, first_k, N, K, T)
    if HOW.SCALES == "group":
        x = beside(tile_bytes(W, read[0], rows.of_W, HOW, T), acc, HOW)
        w = int_weights(W, x, read[1], read[2], HOW)
    else:
        w = byte_weights(beside(read[0], acc, HOW), read[1], HOW)
    if not T.EVEN:
        k = first_k + tl.arange(0, T.K)
        w = tl.where(both(rows.inside, k < K), w, 0.0)
    if to.dense is not None:
        _store(w, rows, first_k, K, to, T)
    v = w + s * acc
    return tl.sum(v * v, axis=1)


@triton.jit
def _read_scales(W, rows, first_k, HOW: tl.constexpr, T: tl.constexpr):
    at, there = pair_groups(W, rows.of_W, first_k, rows.inside, HOW, T.K)
    return tl.load(W.scales + at, mask=there, other=0), at, there


@triton.jit
def read_pairs(W, before, rows, first_k, then, K, HOW: tl.constexpr, T: tl.constexpr):
    """Codes come a tile ahead, scales two: a nested one takes two loads, one after the other. The last tile's, again."""
    x = pair_codes(W.codes, rows.of_W, first_k, rows.inside, K, T.K, 16, T.EVEN)
    if before is None:
        stored, at, there = _read_scales(W, rows, first_k, HOW, T)
    else:
        _, _, _, stored, at, there = before
    value, second = scale_terms(stored, W.code256, W.scales2, at, there, HOW)
    stored, at, there = _read_scales(W, rows, then, HOW, T)
    return x, value, second, stored, at, there


@triton.jit
def _even_and_odd(x, scale, acc, HOW: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr):
    """The weights and the sums of even columns, then those of odd ones, (N, GROUPS, PART) each."""
    acc_even, acc_odd = tl.split(tl.reshape(acc, (N, GROUPS, PART, 2)))
    even, odd = pair_weights(beside(tl.reshape(x, (N, GROUPS, PART)), acc_even, HOW), scale, HOW)
    return even, acc_even, odd, acc_odd


@triton.jit
def _squares(even, acc_even, odd, acc_odd, s):
    v, u = even + s * acc_even, odd + s * acc_odd
    return tl.sum(tl.sum(v * v + u * u, axis=2), axis=1)


@triton.jit
def pairs_tile(W, read, low, b, s, to, rows, first_k, N, K, HOW: tl.constexpr, T: tl.constexpr):
    GROUPS: tl.constexpr = T.K // HOW.GROUP if T.K > HOW.GROUP else 1
    PART: tl.constexpr = T.K // 2 // GROUPS
    _, here = pair_groups(W, rows.of_W, first_k, rows.inside, HOW, T.K)
    x, scale = read[0], scale_from(read[1], read[2], W.code256, W.offset, here, HOW)
    acc = product_of(low, b, rows, first_k, N, K, T)
    if T.TMA and T.EVEN and GROUPS > 1:
        left, right = halves(acc)
        x_left, x_right = halves(x)
        scale_left, scale_right = halves(scale)
        even, acc_even, odd, acc_odd = _even_and_odd(x_left, scale_left, left, HOW, T.N, GROUPS // 2, PART)
        squares = _squares(even, acc_even, odd, acc_odd, s)
        even, acc_even, odd, acc_odd = _even_and_odd(x_right, scale_right, right, HOW, T.N, GROUPS // 2, PART)
        squares += _squares(even, acc_even, odd, acc_odd, s)
    else:
        even, acc_even, odd, acc_odd = _even_and_odd(x, scale, acc, HOW, T.N, GROUPS, PART)
        if not T.EVEN:
            pairs = first_k // 2 + tl.arange(0, T.K // 2)
            whole = tl.reshape(both(rows.inside, pairs < K // 2), (T.N, GROUPS, PART))
            even, odd = tl.where(whole, even, 0.0), tl.where(whole, odd, 0.0)
        if to.dense is not None:
            _store(tl.reshape(tl.join(even, odd), (T.N, T.K)), rows, first_k, K, to, T)
        squares = _squares(even, acc_even, odd, acc_odd, s)
    return squares


@triton.jit
def read_singles(W, before, rows, first_k, then, K, HOW: tl.constexpr, T: tl.constexpr):
    return single_weights(W, rows.of_W, first_k + tl.arange(0, T.K), rows.inside, K, HOW)


@triton.jit
def singles_tile(W, w, low, b, s, to, rows, first_k, N, K, HOW: tl.constexpr, T: tl.constexpr):
    v = w + s * product_of(low, b, rows, first_k, N, K, T)
    if to.dense is not None:
        _store(w, rows, first_k, K, to, T)
    return tl.sum(v * v, axis=1)


@kernel("codes scales scales2 A B partial dense", "N K R A")
def quant_kernel(
    codes, scales, code256, scales2, offset,  # see decode.py
    A, B,  # (R, K), (N, R), or their descriptors
    scale_n, scale_k,  # (N,), (K,)
    partial,  # (runs along K, N)
    dense, pitch,  # W itself, in rows of this pitch
    old_hash, new_hash,  # (WORDS,)
    s, first, N, K, R, groups, stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br,
    HOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RUN: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ONE_SLAB: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """N rows from ``first`` on: B, scale_n and partial begin there, W and what is stored of it do not."""
    low = LowRank(Matrix(A, stride_ar, stride_ak), Matrix(B, stride_bn, stride_br), R, scale_k, scale_n)
    T: tl.constexpr = Blocks(BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN * 2, PRECISION, TMA)
    to, span = Sums(partial, dense, pitch), BLOCK_K * RUN
    W = Codes(codes, scales, code256, scales2, offset, groups, stride_cn, stride_ck)
    READ: tl.constexpr = read_codes8 if HOW.BITS == 8 else read_pairs if HOW.PAIRS else read_singles
    TILE: tl.constexpr = codes8_tile if HOW.BITS == 8 else pairs_tile if HOW.PAIRS else singles_tile
    FOUR: tl.constexpr = HOW.BITS == 4
    AHEAD: tl.constexpr = FOUR or (RUN > 1 and (HOW.SCALES != "block" or HOW.BK % BLOCK_K == 0))
    WALK: tl.constexpr = Run(FOUR and RUN == 1, ONE_SLAB, AHEAD, None, BLOCK_K, FOUR or RUN > 1)
    OF: tl.constexpr = (READ, TILE, HOW, T, WALK)
    of, count = (W, low, s, to, first, N, K, span), tl.cdiv(N, BLOCK_N) * tl.cdiv(K, span)
    walk(squares_of_run, of, OF, count, old_hash, new_hash, WORDS, TMA, PDL)
