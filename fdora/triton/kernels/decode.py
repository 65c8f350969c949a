"""Codes of 4 and 8 bits and their scales as float32, in registers. What that costs: kernels/quant.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fdora.quant.bnb import UNIT as BNB_UNIT
from fdora.triton.kernels.tile import both
from fdora.triton.runtime.lookup import LANE_VALUE, PTX, SHUFFLED

NF4 = tl.constexpr(PTX["nf4"])
FP4 = tl.constexpr(PTX["fp4"])
E2M1 = tl.constexpr(PTX["e2m1"])
UNIT = tl.constexpr(BNB_UNIT)
REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r")
NF4_LANE = tl.constexpr(LANE_VALUE["nf4"])
FP4_LANE = tl.constexpr(LANE_VALUE["fp4"])
E2M1_LANE = tl.constexpr(LANE_VALUE["e2m1"])
SHUFFLE = tl.constexpr(SHUFFLED)
AND_VALUES = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r")  # those of four bytes, all the same


class Codes(NamedTuple):
    """A W of codes. Of 4 bits: two to a byte, the scales of groups, what those are made of, and how many a row has; of few
    tokens eight to a word, ``row`` to a row. Of 8: with their strides.

    Packed integers have the zeros of groups as ``code256`` and the group of each column, if any, as ``scales2``. ``row`` is
    what lies between words of a row (gptq) or a column (awq), or between rows (hqq); ``col`` what lies between zeros of groups,
    or how many rows have bytes (hqq)."""

    codes: Any
    scales: Any
    code256: Any
    scales2: Any
    offset: Any
    groups: Any
    row: Any
    col: Any


class How(NamedTuple):
    """The constants of either: decoding of fdora/triton/codes.py.

    Of packed integers (SCALES group) BN is their bits, BK the columns of a group; BY_BITS: stored zeros are one less.
    """

    BITS: Any
    CODE: Any
    HIGH_FIRST: Any
    GROUP: Any
    SCALES: Any
    FLAT: Any
    PAIRS: Any
    BY_BITS: Any
    BN: Any
    BK: Any
    PTX: Any


@triton.jit
def _nf4(x):
    """The value of codes 0 to 15: a tree of selects."""
    b0, b1, b2 = (x & 1) != 0, (x & 2) != 0, (x & 4) != 0
    n0, n1 = tl.where(b0, -0.6961928009986877, -1.0), tl.where(b0, -0.39491748809814453, -0.5250730514526367)
    n2, n3 = tl.where(b0, -0.18477343022823334, -0.28444138169288635), tl.where(b0, 0.0, -0.09105003625154495)
    p0, p1 = tl.where(b0, 0.16093020141124725, 0.07958029955625534), tl.where(b0, 0.33791524171829224, 0.24611230194568634)
    p2, p3 = tl.where(b0, 0.5626170039176941, 0.44070982933044434), tl.where(b0, 1.0, 0.7229568362236023)
    n, p = tl.where(b2, tl.where(b1, n3, n2), tl.where(b1, n1, n0)), tl.where(b2, tl.where(b1, p3, p2), tl.where(b1, p1, p0))
    return tl.where((x & 8) != 0, p, n)


@triton.jit
def _fp4(x):
    """bitsandbytes' FP4. With h = bits 1 and 2: 2^(1-h) for odd codes, 4/3 2^-h for even ones; 4/3 2^-8 and 0 where h is 0."""
    odd, h = (x & 1) != 0, x & 6
    big = tl.where(odd, 0x40000000, 0x3FAAAAAB) - (h << 22)
    small = tl.where(odd, 0x3BAAAAAB, 0)
    return (tl.where(h == 0, small, big) | ((x & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(x):
    """Two bits of exponent and one of mantissa: those of a float32 after 2^126."""
    return (((x & 7) << 22) | ((x & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def nibble(x, TABLE: tl.constexpr):
    """The values of int32 codes 0 to 15."""
    if TABLE == "nf4":
        return _nf4(x)
    elif TABLE == "fp4":
        return _fp4(x)
    else:
        return _e2m1(x)


@triton.jit
def nibbles(x, HOW: tl.constexpr):
    """The values of the low and of the high halves of bytes. PTX: 2 by shuffles, 1 by permutes, 0 by selects."""
    TABLE: tl.constexpr = HOW.CODE
    if HOW.PTX == 2:
        LANE: tl.constexpr = NF4_LANE if TABLE == "nf4" else FP4_LANE if TABLE == "fp4" else E2M1_LANE
        value = tl.inline_asm_elementwise(LANE, "=r", [], tl.int32, True, 1)
        low, high = tl.inline_asm_elementwise(SHUFFLE, AND_VALUES, [x, value], (tl.float32, tl.float32), True, 4)
    elif HOW.PTX:
        TEXT: tl.constexpr = NF4 if TABLE == "nf4" else FP4 if TABLE == "fp4" else E2M1
        low, high = tl.inline_asm_elementwise(TEXT, REGISTERS, [x], (tl.float32, tl.float32), True, 4)
    else:
        x = x.to(tl.int32)
        low, high = nibble(x & 15, TABLE), nibble(x >> 4, TABLE)
    return low, high


@triton.jit
def e4m3(x):
    """Bytes as float8 e4m3: the bits of a float32 after 2^120. 0x7f and 0xff are NaN."""
    x = x.to(tl.int32)
    v = (((x & 127) << 20) | ((x & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((x & 127) == 127, float("nan"), v)


@triton.jit
def e8m0(x):
    """2^(x - 127); 255 is NaN, and 0 a float32 below the normal ones."""
    x = x.to(tl.int32)
    return tl.where(x == 255, 0x7FC00000, tl.where(x == 0, 0x400000, x << 23)).to(tl.float32, bitcast=True)


@triton.jit
def scale_terms(x, code256, scales2, at, mask, HOW: tl.constexpr):
    """What a nested scale is made of, read: its value in code256 and its second scale. Of others the stored one, twice."""
    if HOW.SCALES == "nested":
        return tl.load(code256 + x.to(tl.int32), mask=mask, other=0.0), tl.load(scales2 + (at >> 8), mask=mask, other=0.0)
    else:
        return x, x


@triton.jit
def scale_from(x, second, code256, offset, mask, HOW: tl.constexpr):
    """The float32 scale of these terms. 0 outside of the mask."""
    if HOW.SCALES == "nested":
        # A fused multiply-add for the product alone, so that no compiler fuses it with the sum: bitsandbytes rounds twice.
        return tl.where(mask, tl.fma(x, second, 0.0) + tl.load(offset), 0.0)
    elif HOW.SCALES == "e8m0":
        return tl.where(mask, e8m0(x), 0.0)
    elif HOW.SCALES == "e4m3*global":  # code256 is the global scale
        return tl.where(mask, e4m3(x) * tl.load(code256), 0.0)
    elif HOW.SCALES == "e4m3/global":
        return tl.where(mask, tl.math.div_rn(e4m3(x), tl.load(code256)), 0.0)
    else:
        return x


@triton.jit
def scale_of(x, code256, scales2, offset, at, mask, HOW: tl.constexpr):
    """The same of a stored scale, that of the group ``at``."""
    x, second = scale_terms(x, code256, scales2, at, mask, HOW)
    return scale_from(x, second, code256, offset, mask, HOW)


@triton.jit
def group_scale(W, at, mask, HOW: tl.constexpr):
    """The float32 scale of each group: ``at`` is its number. 0 outside of the mask."""
    return scale_of(tl.load(W.scales + at, mask=mask, other=0), W.code256, W.scales2, W.offset, at, mask, HOW)


@triton.jit
def pair_codes(codes, row, first_k, in_n, K, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr):
    """The bytes of a tile whose rows are whole ones. VECTOR: how many a thread reads at once, at most."""
    j = first_k // 2 + tl.arange(0, BLOCK_K // 2)
    at = tl.max_contiguous(codes + row[:, None] * (K // 2) + j[None, :], (1, VECTOR))
    return tl.load(at) if EVEN else tl.load(at, mask=both(in_n, j < K // 2), other=0)


@triton.jit
def pair_groups(W, row, first_k, in_n, HOW: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N, groups of a tile): their numbers, and which there are."""
    g = first_k // HOW.GROUP + tl.arange(0, BLOCK_K // HOW.GROUP if BLOCK_K > HOW.GROUP else 1)
    return row[:, None] * W.groups + g[None, :], both(in_n, g < W.groups)


@triton.jit
def pair_weights(x, scale, HOW: tl.constexpr):
    """Those of the even columns and those of the odd ones, of bytes (N, groups, bytes of one) and the scales of groups."""
    low, high = nibbles(x, HOW)
    return (high if HOW.HIGH_FIRST else low) * scale[:, :, None], (low if HOW.HIGH_FIRST else high) * scale[:, :, None]


@triton.jit
def single_weights(W, row, k, in_n, K, HOW: tl.constexpr):
    """W at a tile wherever its codes and groups lie: an address for each. For shapes that no model has."""
    inside = both(in_n, k < K)
    e = row[:, None] * K + k[None, :]
    x = tl.load(W.codes + (e >> 1), mask=inside, other=0).to(tl.int32)
    shift = (e & 1).to(tl.int32) * 4
    shift = 4 - shift if HOW.HIGH_FIRST else shift
    g = e // HOW.GROUP if HOW.FLAT else row[:, None] * W.groups + (k // HOW.GROUP)[None, :]
    scale = group_scale(W, g, inside, HOW)
    CODE: tl.constexpr = HOW.CODE
    return tl.where(inside, nibble((x >> shift) & 15, CODE) * scale, 0.0)


@triton.jit
def byte_weights(x, scale, HOW: tl.constexpr):
    """e4m3 codes come as bytes: Triton has no float8 below sm_89 (BY_BITS)."""
    if HOW.CODE == "int8":
        return x.to(tl.float32) * scale
    elif HOW.CODE == "int8/127":
        return x.to(tl.float32) * scale * UNIT
    elif HOW.BY_BITS:
        return e4m3(x) * scale
    else:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale


@triton.jit
def byte_scales(W, row, k, first_k, in_n, inside, HOW: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N, 1), or one for each element where blocks are narrower than tiles."""
    if HOW.SCALES == "tensor":
        return tl.where(in_n, tl.load(W.scales), 0.0)[:, None]
    elif HOW.SCALES == "row":
        return tl.load(W.scales + row, mask=in_n, other=0.0)[:, None]
    elif HOW.BK % BLOCK_K == 0:  # a tile lies in one column of blocks
        return tl.load(W.scales + (row // HOW.BN) * W.groups + first_k // HOW.BK, mask=in_n, other=0.0)[:, None]
    else:
        return tl.load(W.scales + (row // HOW.BN)[:, None] * W.groups + (k // HOW.BK)[None, :], mask=inside, other=0.0)


@triton.jit
def words_at(W, n, k, HOW: tl.constexpr):
    """Where the word of row n and column k lies; n counts eights of rows (awq), k the words of a row (gptq)."""
    if HOW.CODE == "gptq" or HOW.CODE == "awq":
        return W.codes + k.to(tl.int64) * W.row + n
    else:
        return W.codes + (n % W.col).to(tl.int64) * W.row + k


@triton.jit
def tile_words(W, n, in_n, first_k, K, HOW: tl.constexpr, T: tl.constexpr, VECTOR: tl.constexpr):
    """The words, or bytes, of a tile (N, K) of packed integers."""
    PER: tl.constexpr = 32 // HOW.BN
    if HOW.CODE == "awq":
        n = tl.min(n, axis=0) // 8 + tl.arange(0, T.N // 8)
        k, in_n, in_k = first_k + tl.arange(0, T.K), n < W.row, first_k + tl.arange(0, T.K) < K
        at = words_at(W, n[:, None], k[None, :], HOW)
    elif HOW.CODE == "gptq":
        k = first_k // PER + tl.arange(0, T.K // PER)
        in_k, at = k < K // PER, words_at(W, n[:, None], k[None, :], HOW)
    else:
        k = first_k + tl.arange(0, T.K)
        in_k, at = k < K, tl.max_contiguous(words_at(W, n[:, None], k[None, :], HOW), (1, VECTOR))
    return tl.load(at) if T.EVEN else tl.load(at, mask=both(in_n, in_k), other=0)


@triton.jit
def tile_bytes(W, x, n, HOW: tl.constexpr, T: tl.constexpr):
    """The codes in those."""
    BITS: tl.constexpr = HOW.BN
    if HOW.CODE == "awq":
        x = x[:, None, :] >> of_eight(tl.arange(0, 8))[None, :, None] * 4
    elif HOW.CODE == "gptq":
        x = x[:, :, None] >> (tl.arange(0, 32 // BITS) * BITS)[None, None, :]
    elif BITS == 4:
        x = x >> tl.where(n < W.col, 4, 0).to(tl.uint8)[:, None]
    return tl.reshape((x & ((1 << BITS) - 1)).to(tl.uint8), (T.N, T.K))


@triton.jit
def of_eight(i):
    """Where in a word of AWQ the i-th row is."""
    return i // 2 + i % 2 * 4


@triton.jit
def tile_scales(W, n, in_n, first_k, K, HOW: tl.constexpr, T: tl.constexpr):
    """The scales and zeros of a tile, (N, 1) where it lies in one group."""
    k = first_k + tl.arange(0, T.K)
    n, in_n = n[:, None], in_n[:, None]
    if W.scales2 is not None:
        g = tl.load(W.scales2 + tl.minimum(k, K - 1)).to(tl.int32)
        first = tl.min(g, axis=0)
        if first == tl.max(g, axis=0):  # as where columns were not reordered
            scale, zero = int_scales(W, n, tl.zeros((1, 1), tl.int32) + first, in_n, HOW)
            scale, zero = tl.broadcast_to(scale, (T.N, T.K)), tl.broadcast_to(zero, (T.N, T.K))
        else:
            scale, zero = int_scales(W, n, g[None, :], in_n, HOW)
    elif HOW.BK % T.K == 0:
        scale, zero = int_scales(W, n, tl.zeros((1, 1), tl.int32) + first_k // HOW.BK, in_n, HOW)
    else:
        scale, zero = int_scales(W, n, (k // HOW.BK)[None, :], in_n, HOW)
    return scale, zero


@triton.jit
def int_scales(W, n, g, mask, HOW: tl.constexpr):
    """Scales and zeros of rows n and groups g, float32. NaN where an index is of no group."""
    there = mask & (g >= 0) & (g < W.groups)
    if HOW.CODE == "gptq" or HOW.CODE == "awq":
        BITS: tl.constexpr = HOW.BN
        PER: tl.constexpr = 32 // BITS
        g = g.to(tl.int64)
        rows = W.row * 8 if HOW.CODE == "awq" else W.row
        scale = tl.load(W.scales + g * rows + n, mask=there, other=0.0)
        word = tl.load(W.code256 + g * W.col + n // PER, mask=there, other=0)
        if HOW.BY_BITS:
            word = word.to(tl.int64) + (0x11111111 if BITS == 4 else 0x01010101)
        i = (n % PER).to(tl.int32)
        zero = (word >> (of_eight(i) if HOW.CODE == "awq" else i) * BITS) & ((1 << BITS) - 1)
    else:
        at = n.to(tl.int64) * W.groups + g
        scale, zero = tl.load(W.scales + at, mask=there, other=0.0), tl.load(W.code256 + at, mask=there, other=0.0)
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    if W.scales2 is not None:
        scale = tl.where(mask & (there == 0), float("nan"), scale)
    return scale, zero


@triton.jit
def int_weights(W, x, scale, zero, HOW: tl.constexpr):
    """Of bytes. A code is the last bits of a float32 of 2^23: the conversion of integers takes four times as long."""
    v = (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return int_values(W, v, scale, zero, tl.float32, HOW)


@triton.jit
def int_values(W, v, scale, zero, dtype: tl.constexpr, HOW: tl.constexpr):
    """Of codes v, rounded once to ``dtype``; in 16 bits where each step is exact there, or is rounded by the format itself."""
    OF_SCALES: tl.constexpr = W.scales.dtype.element_ty
    HQQ: tl.constexpr = "hqq torch.bfloat16" if dtype == tl.bfloat16 else "hqq torch.float16"
    if v.dtype == dtype and HOW.CODE == HQQ and dtype == OF_SCALES and W.code256.dtype.element_ty == dtype:
        return (v - zero.to(dtype)) * scale.to(dtype)
    if v.dtype == dtype and (dtype == OF_SCALES or tl.float16 == OF_SCALES) and (HOW.CODE == "gptq" or HOW.CODE == "awq"):
        v -= zero.to(dtype)
        high = scale.to(dtype)
        if dtype == OF_SCALES:
            return v * high
        return tl.fma(v, high, v * (scale - high.to(tl.float32)).to(dtype))  # 11 bits are 8 and 3: that product is exact
    v = v.to(tl.float32) - zero
    if HOW.CODE == "hqq torch.float16":
        v = _rounded(_rounded(v, W.code256, W.code256, tl.float16) * scale, W.code256, W.scales, tl.float16)
    elif HOW.CODE == "hqq torch.bfloat16":
        v = _rounded(_rounded(v, W.code256, W.code256, tl.bfloat16) * scale, W.code256, W.scales, tl.bfloat16)
    else:
        v *= scale
    return v.to(dtype)


@triton.jit
def _rounded(v, a, b, HALF: tl.constexpr):
    """v to this dtype, where torch computes in it: beside such a and b."""
    if a.dtype.element_ty == HALF and b.dtype.element_ty == HALF:
        v = v.to(HALF).to(tl.float32)
    return v


@triton.jit
def beside(x, acc, HOW: tl.constexpr):
    """x, which changes registers as bytes: into those that hold the same elements of acc.

    Left to itself Triton 3.9 decodes where the load put them, and moves float32 through shared memory. This move of four
    bytes, which names acc and does not read it, costs nothing: the assembler drops it.
    """
    if HOW.PTX:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r,r", [x, acc], x.dtype, True, 4)
    return x
