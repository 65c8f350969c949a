"""The layer for a handful of tokens, straight from codes; see fdora/triton/small_quant.py.

A tile of the result lies transposed, one row for each column of y: weights are the left operand, which tensor cores take
from registers, where they are decoded. No weight changes registers after that, by one permutation: a product is a sum,
whatever the order of its terms, so a thread's four words of 8 codes are the terms that its place in the operand asks for, and x
is permuted alike. What a thread takes from shared memory is 16 bytes of codes and 16 of x.

4 bits   A group's table is multiplied by its scale first: 16 products rounded to the dtype of x, the same numbers that a
         dense W would hold, in 8 registers of bytes. A word of 8 codes then takes 12 byte permutes for the two planes and 4 to
         pair them up, where float32 weights took 45, 8 products and 4 roundings.
8 bits   A conversion, a product by the scale, half a rounding.
Packed   Of HQQ, GPTQ and AWQ: two codes at once become 16-bit numbers, less a zero and times a scale. In the loop 4.6, 5.3 and
         6.2 instructions for each weight, where NF4 has 5.45 (Triton 3.9). Wider integers go by float32.

Instructions for each weight, of which a multiprocessor starts 64 a clock (SASS for sm_90, 32 rows, 16 tokens): 2.25 permutes,
0.9 others, half a float32 product; 3.2 against 7.1 by float32. 4096 x 4096 take 3 us at best, and their bytes 1.8.

``SLICES``: warps that share a tile of the result, each with terms of its own, added at the end in a fixed order. Few columns
for each program are what fills the GPU; with one slice all warps would have to share these few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fdora.triton.kernels.decode import byte_weights, int_scales, int_values, nibble, scale_of, words_at
from fdora.triton.kernels.tile import vector, zeros
from fdora.triton.runtime.lookup import PICKED, SCALED

NF4_BF16 = tl.constexpr(SCALED["bf16"]["nf4"])
NF4_F16 = tl.constexpr(SCALED["f16"]["nf4"])
FP4_BF16 = tl.constexpr(SCALED["bf16"]["fp4"])
FP4_F16 = tl.constexpr(SCALED["f16"]["fp4"])
E2M1_BF16 = tl.constexpr(SCALED["bf16"]["e2m1"])
E2M1_F16 = tl.constexpr(SCALED["f16"]["e2m1"])
HIGH = tl.constexpr(PICKED[True])
LOW = tl.constexpr(PICKED[False])
APART = tl.constexpr("mov.b32 {$0, $1}, $2;")
TO_TABLE = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r")
TO_WEIGHTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r")


class Tile(NamedTuple):
    """Constants of a tile of the result, M tokens and N columns, and of a slice of K terms. ``COLUMNS``: the result has the
    columns of W. ``EVEN``: every tile is whole."""

    M: Any
    N: Any
    K: Any
    SLICES: Any
    COLUMNS: Any
    EVEN: Any


@triton.jit
def _weights(x, scale, dtype: tl.constexpr, HOW: tl.constexpr):
    """Words of 8 codes, a scale for each -> weights in ``dtype`` on three more axes: number 4 s + 2 h + b at (b, h, s)."""
    TABLE: tl.constexpr = HOW.CODE
    HIGH_FIRST: tl.constexpr = HOW.HIGH_FIRST
    if HOW.PTX:
        IS_BF16: tl.constexpr = dtype == tl.bfloat16
        FOUR: tl.constexpr = (NF4_BF16 if IS_BF16 else NF4_F16) if TABLE == "nf4" else FP4_BF16 if IS_BF16 else FP4_F16
        TEXT: tl.constexpr = (E2M1_BF16 if IS_BF16 else E2M1_F16) if TABLE == "e2m1" else FOUR
        # One table for all words of a group in a thread: what is computed twice from the same register is computed once.
        t0, t1, t2, t3, t4, t5, t6, t7 = tl.inline_asm_elementwise(
            TEXT, TO_TABLE, [scale], (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
        TO: tl.constexpr = HIGH if HIGH_FIRST else LOW  # twice, since Triton (3.6, 3.9) takes no argument for these dtypes
        if IS_BF16:
            w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
                TO,
                TO_WEIGHTS,
                [x, t0, t1, t2, t3, t4, t5, t6, t7],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                True,
                1,
            )
        else:
            w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
                TO,
                TO_WEIGHTS,
                [x, t0, t1, t2, t3, t4, t5, t6, t7],
                (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
                True,
                1,
            )
    else:
        FIRST: tl.constexpr = 4 if HIGH_FIRST else 0
        w0, w1 = _weight(x, scale, FIRST, dtype, TABLE), _weight(x, scale, 4 - FIRST, dtype, TABLE)
        w2, w3 = _weight(x, scale, 8 + FIRST, dtype, TABLE), _weight(x, scale, 12 - FIRST, dtype, TABLE)
        w4, w5 = _weight(x, scale, 16 + FIRST, dtype, TABLE), _weight(x, scale, 20 - FIRST, dtype, TABLE)
        w6, w7 = _weight(x, scale, 24 + FIRST, dtype, TABLE), _weight(x, scale, 28 - FIRST, dtype, TABLE)
    return tl.join(tl.join(tl.join(w0, w1), tl.join(w2, w3)), tl.join(tl.join(w4, w5), tl.join(w6, w7)))


@triton.jit
def _weight(x, scale, SHIFT: tl.constexpr, dtype: tl.constexpr, TABLE: tl.constexpr):
    return (nibble((x >> SHIFT) & 15, TABLE) * scale).to(dtype)


@triton.jit
def _tile4(
    W, scale, n, word, N, dtype: tl.constexpr, HOW: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    IN_TILE: tl.constexpr,
):
    """Weights at rows n (SLICES, ROWS) and words (SLICES, WORDS), as above, one more axis for the groups."""
    at = W.codes + n[:, :, None].to(tl.int64) * W.row + word[:, None, :]
    x = tl.load(at) if T.EVEN else tl.load(at, mask=(n < N)[:, :, None] & (word < W.row)[:, None, :], other=0)
    x = tl.reshape(x, (T.SLICES, ROWS, IN_TILE, WORDS // IN_TILE))
    each = tl.broadcast_to(scale[:, :, :, None], (T.SLICES, ROWS, IN_TILE, WORDS // IN_TILE))
    return _weights(x, each, dtype, HOW)


@triton.jit
def _groups(W, n, first, N, HOW: tl.constexpr, IN_TILE: tl.constexpr):
    """Numbers of the groups that rows n (SLICES, ROWS) have from columns ``first`` (SLICES,) on, and which there are."""
    g = (first // HOW.GROUP)[:, None] + tl.arange(0, IN_TILE)[None, :]
    return n[:, :, None].to(tl.int64) * W.groups + g[:, None, :], (n < N)[:, :, None] & (g < W.groups)[:, None, :]


@triton.jit
def _stored(W, n, first, N, HOW: tl.constexpr, IN_TILE: tl.constexpr):
    """Their scales as they are stored."""
    at, mask = _groups(W, n, first, N, HOW, IN_TILE)
    return tl.load(W.scales + at, mask=mask, other=0)


@triton.jit
def _scale(W, stored, n, first, N, HOW: tl.constexpr, IN_TILE: tl.constexpr):
    """What those stand for."""
    at, mask = _groups(W, n, first, N, HOW, IN_TILE)
    return scale_of(stored, W.code256, W.scales2, W.offset, at, mask, HOW)


@triton.jit
def _tokens(x, t, k, M, K, EVEN: tl.constexpr):
    """Rows t of x (M, K) at terms k (SLICES, BLOCK_K)."""
    at = x.p + t[None, :, None].to(tl.int64) * x.row + k[:, None, :].to(tl.int64) * x.col
    return tl.load(at, mask=(t < M)[None, :, None] & (EVEN | (k < K))[:, None, :], other=0.0)


@triton.jit
def _product(acc, w, x, T: tl.constexpr):
    if T.SLICES == 1:
        return tl.dot(tl.reshape(w, (T.N, T.K)), tl.reshape(x, (T.K, T.M)), acc)
    else:
        return tl.dot(tl.reshape(w, (T.SLICES, T.N, T.K)), tl.reshape(x, (T.SLICES, T.K, T.M)), acc)


@triton.jit
def _zeros(T: tl.constexpr):
    return zeros(T.N, T.M) if T.SLICES == 1 else tl.zeros((T.SLICES, T.N, T.M), tl.float32)


@triton.jit
def _dealt(w, x, ALONG_N: tl.constexpr, IN_ORDER: tl.constexpr, HALVES: tl.constexpr, T: tl.constexpr):
    """Weights (SLICES, rows of words, words, b, p, q) and x (SLICES, BLOCK_M, BLOCK_K) as operands, words and their codes dealt
    out such that a thread has all codes of those that it reads: it has two rows of 16, 8 apart, and of 16 terms two pairs, 8
    apart. ``ALONG_N``: a word has columns of the result. Codes are number 4 q + 2 p + b in it (IN_ORDER) or 4 b + 2 q + p, or p
    is no place in it (HALVES)."""
    ROWS: tl.constexpr = w.shape[1]
    TERMS: tl.constexpr = w.shape[2]
    Q: tl.constexpr = w.shape[5]
    P: tl.constexpr = 1 if HALVES else 2
    L: tl.constexpr = 8 if ROWS >= 8 else ROWS
    if ALONG_N:  # four warps that multiply as one (wgmma) hold 16 rows of each 64: 32 words
        I: tl.constexpr = ROWS // 32 if ROWS >= 32 else 1
        J: tl.constexpr = TERMS // (4 * P)
        w = tl.reshape(w, (T.SLICES, ROWS // (L * I), L, I, J, P, 4, 2, 2, Q))
        w = tl.permute(w, (0, 3, 9, 5, 1, 7, 2, 4, 6, 8) if HALVES else (0, 3, 9, 8, 1, 7, 2, 4, 6, 5))
        x = tl.reshape(x, (T.SLICES, T.M, 2, J, 4) if HALVES else (T.SLICES, T.M, J, 2, 4))
        x = tl.permute(x, (0, 3, 4, 2, 1) if HALVES else (0, 2, 4, 3, 1))
    else:
        G: tl.constexpr = 4 if TERMS >= 4 else TERMS
        E: tl.constexpr = 4 if TERMS >= 4 * G else TERMS // G  # words side by side, to a thread
        F: tl.constexpr = TERMS // (G * E)
        w = tl.reshape(w, (T.SLICES, ROWS // L, L, F, G, E, 2, 2, Q))
        w = tl.permute(w, (0, 1, 7, 2, 3, 5, 8, 4, 6) if HALVES else (0, 1, 2, 3, 5, 8, 7, 4, 6))
        x = tl.reshape(x, (T.SLICES, T.M, F, G, E, Q, P, 2) if IN_ORDER else (T.SLICES, T.M, F, G, E, 2, Q, P))
        x = tl.permute(x, (0, 2, 4, 5, 6, 3, 7, 1) if IN_ORDER else (0, 2, 4, 6, 7, 3, 5, 1))
    return w, x


@triton.jit
def _in_place(
    acc, ROWS: tl.constexpr, Q: tl.constexpr, ALONG_N: tl.constexpr, IN_ORDER: tl.constexpr, HALVES: tl.constexpr,
    T: tl.constexpr,
):
    """The sum of such a product over slices, columns of the result in their order. ROWS of words, with Q places of q."""
    acc = acc if T.SLICES == 1 else tl.sum(acc, axis=0)
    L: tl.constexpr = 8 if ROWS >= 8 else ROWS
    I: tl.constexpr = ROWS // 32 if ROWS >= 32 else 1
    if ALONG_N:
        acc = tl.reshape(acc, (I, Q, 1 if HALVES else 2, ROWS // (L * I), 2, L, T.M))
        acc = tl.permute(acc, (3, 5, 0, 1, 2, 4, 6) if IN_ORDER else (3, 5, 0, 4, 1, 2, 6))
    elif HALVES:
        acc = tl.permute(tl.reshape(acc, (ROWS // L, 2, L, T.M)), (1, 0, 2, 3))
    return tl.reshape(acc, (T.N, T.M))


@triton.jit
def _place(col, first, T: tl.constexpr):
    """The rows and the columns of W where tiles (SLICES,) begin: at column ``col`` of the result and terms ``first``."""
    col += tl.zeros((T.SLICES,), tl.int32)
    return (first, col) if T.COLUMNS else (col, first)


@triton.jit
def fours(x, W, col, begin, end, M, N, K, HOW: tl.constexpr, T: tl.constexpr):
    """A W of 4-bit codes times x (M, K), terms from ``begin``, a whole step, to ``end``: (BLOCK_N, BLOCK_M). ``COLUMNS``: K
    counts rows of W."""
    ROWS: tl.constexpr = T.K if T.COLUMNS else T.N
    WORDS: tl.constexpr = (T.N if T.COLUMNS else T.K) // 8
    IN_TILE: tl.constexpr = 8 * WORDS // HOW.GROUP if 8 * WORDS > HOW.GROUP else 1
    STEP: tl.constexpr = T.SLICES * T.K
    t, k, i, rows = tl.arange(0, T.M), tl.arange(0, T.K)[None, :], tl.arange(0, T.SLICES) * T.K, K if T.COLUMNS else N
    r = tl.arange(0, ROWS)[None, :]
    acc = _zeros(T)
    # Scales come two steps ahead of the codes they belong to: a nested one takes two loads, one after the other.
    row, first = _place(col, begin + i, T)
    scale = _scale(W, _stored(W, row[:, None] + r, first, rows, HOW, IN_TILE), row[:, None] + r, first, rows, HOW, IN_TILE)
    row, first = _place(col, begin + STEP + i, T)
    stored = _stored(W, row[:, None] + r, first, rows, HOW, IN_TILE)
    for k0 in range(begin, end, STEP):
        row, first = _place(col, k0 + 2 * STEP + i, T)
        after = _stored(W, row[:, None] + r, first, rows, HOW, IN_TILE)
        row, first = _place(col, k0 + STEP + i, T)
        next_scale = _scale(W, stored, row[:, None] + r, first, rows, HOW, IN_TILE)
        row, first = _place(col, k0 + i, T)
        word = (first // 8)[:, None] + tl.arange(0, WORDS)[None, :]
        w = _tile4(W, scale, row[:, None] + r, word, rows, x.p.dtype.element_ty, HOW, T, ROWS, WORDS, IN_TILE)
        w = tl.reshape(w, (T.SLICES, ROWS, WORDS, 2, 2, 2))
        xt = _tokens(x, t, (k0 + i)[:, None] + k, M, K, T.EVEN)
        w, xt = _dealt(tl.permute(w, (0, 2, 1, 3, 4, 5)) if T.COLUMNS else w, xt, T.COLUMNS, True, False, T)
        acc = _product(acc, w, xt, T)
        scale, stored = next_scale, after
    return _in_place(acc, WORDS, 2, T.COLUMNS, True, False, T)


@triton.jit
def in_halves(first, i, SIZE: tl.constexpr, rows, EVEN: tl.constexpr):
    """Which rows of W the numbers i of a tile are where a byte has codes of two: first those of the lower half of W."""
    row, half = first // 2 + i % (SIZE // 2), (1 - i // (SIZE // 2)) * (rows // 2)
    return row + half if EVEN else tl.where(row < rows // 2, row + half, rows)


@triton.jit
def _two(x, SHIFT: tl.constexpr, dtype: tl.constexpr, HOW: tl.constexpr):
    """The codes of words that begin at this bit, and 16 bits on. Two of 4 bits become numbers of 16 bits at once, as their last
    bits: from 2^7 on (bfloat16), or 2^10, integers follow each other."""
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    HALF: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float16
    x = x >> SHIFT
    if HOW.BN == 8:
        v = (tl.join(x & 255, (x >> 16) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        x = (x & 0x000F000F) | (0x43004300 if IS_BF16 else 0x64006400)
        if HOW.PTX:  # after a shift both would be put together once more
            low, high = tl.inline_asm_elementwise(APART, "=h,=h,r", [x], (tl.int16, tl.int16), True, 1)
        else:
            low, high = x.to(tl.int16), (x >> 16).to(tl.int16)
        v = tl.join(low, high).to(HALF, bitcast=True) - (128.0 if IS_BF16 else 1024.0)
    return v


@triton.jit
def _word_scales(W, row, column, in_row, in_column, rows, columns, GROUPS: tl.constexpr, HOW: tl.constexpr):
    """Scales and zeros of tiles that begin at a row and a column of W. GROUPS: of their columns, 0 where tiles cut some."""
    row, column = row[:, None, None, None, None, None] + in_row, column[:, None, None, None, None, None]
    if W.scales2 is not None:
        g = tl.load(W.scales2 + tl.minimum(column + in_column, columns - 1)).to(tl.int32)
    elif GROUPS:
        g = column // HOW.BK + tl.arange(0, GROUPS)[None, None, :, None, None, None]
    else:
        g = (column + in_column) // HOW.BK
    return int_scales(W, row, g, row < rows, HOW)


@triton.jit
def ints(x, W, col, begin, end, M, N, K, HOW: tl.constexpr, T: tl.constexpr):
    """A W of packed integers times x (M, K): (BLOCK_N, BLOCK_M). ``COLUMNS``: K counts rows of W.

    The codes of a word, of columns of W or of rows (AWQ), have three axes: b, of its upper half, p and q. Their number in it is
    4 b + 2 q + p, or 4 q + 2 p + b (AWQ). Of HQQ's 4 bits p is the half of W, the lower one first."""
    dtype: tl.constexpr = x.p.dtype.element_ty
    AWQ: tl.constexpr = HOW.CODE == "awq"
    HALVES: tl.constexpr = HOW.BN == 4 and HOW.CODE != "gptq" and not AWQ
    H: tl.constexpr = 2 if HALVES else 1
    Q: tl.constexpr = 8 // HOW.BN
    HIGH: tl.constexpr = 8 if AWQ else 1  # rows of a word
    WIDE: tl.constexpr = 1 if AWQ else 4 * Q // H
    ROWS: tl.constexpr = (T.K if T.COLUMNS else T.N) // (HIGH * H)  # of words
    COLUMNS: tl.constexpr = T.N if T.COLUMNS else T.K
    WORDS: tl.constexpr = COLUMNS // WIDE
    WHOLE: tl.constexpr = W.scales2 is None and (HOW.BK % COLUMNS == 0 or COLUMNS % HOW.BK == 0)
    GROUPS: tl.constexpr = 0 if not WHOLE else COLUMNS // HOW.BK if COLUMNS > HOW.BK else 1
    G: tl.constexpr = GROUPS if GROUPS else WORDS
    STEP: tl.constexpr = T.SLICES * T.K
    b, p, q = tl.arange(0, 2)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, Q)[None, None, :]
    inside = 4 * q + 2 * p + b if AWQ else WIDE // 2 * b + WIDE // 2 // Q * q + (0 if HALVES else p)
    rows, columns = (K, N) if T.COLUMNS else (N, K)
    r, c = tl.arange(0, ROWS)[None, :, None], tl.arange(0, WORDS)[None, None, :]
    in_row = r[:, :, :, None, None, None] * HIGH + (inside if AWQ else (1 - p) * (rows // 2) if HALVES else 0)
    in_column = c[:, :, :, None, None, None] * WIDE + (0 if AWQ else inside)
    t, k, slices = tl.arange(0, T.M), tl.arange(0, T.K)[None, :], tl.arange(0, T.SLICES) * T.K
    acc = _zeros(T)
    row, column = _place(col, begin + slices, T)
    scale, zero = _word_scales(W, row // H, column, in_row, in_column, rows, columns, GROUPS, HOW)
    for k0 in range(begin, end, STEP):
        row, column = _place(col, k0 + STEP + slices, T)  # scales come a step ahead of the codes they belong to
        next_scale, next_zero = _word_scales(W, row // H, column, in_row, in_column, rows, columns, GROUPS, HOW)
        row, column = _place(col, k0 + slices, T)
        at_row, at_column = (row // (HIGH * H))[:, None, None] + r, (column // WIDE)[:, None, None] + c
        mask = (at_row * HIGH < rows // H) & (at_column * WIDE < columns)
        at = words_at(W, at_row, at_column, HOW)
        w = tl.load(at) if T.EVEN else tl.load(at, mask=mask, other=0)
        v = tl.join(_two(w, 0, dtype, HOW), _two(w, HOW.BN, dtype, HOW))
        if Q == 2:
            v = tl.join(v, tl.join(_two(w, 8, dtype, HOW), _two(w, 12, dtype, HOW)))
        v = tl.reshape(v, (T.SLICES, ROWS, G, WORDS // G, 2, 2, Q))
        # This axis is new here: else Triton would give codes the registers of their scales, and move them after that.
        w = int_values(W, v, scale[:, :, :, None, :, :, :], zero[:, :, :, None, :, :, :], dtype, HOW)
        w = tl.reshape(w, (T.SLICES, ROWS, WORDS, 2, 2, Q))
        at_k = (k0 + slices)[:, None]
        xt = _tokens(x, t, in_halves(at_k, k, T.K, K, T.EVEN) if HALVES and T.COLUMNS else at_k + k, M, K, T.EVEN)
        w = tl.permute(w, (0, 2, 1, 3, 4, 5)) if T.COLUMNS else w
        w, xt = _dealt(w, xt, AWQ != T.COLUMNS, AWQ, HALVES, T)
        acc = _product(acc, w, xt, T)
        scale, zero = next_scale, next_zero
    return _in_place(acc, WORDS if T.COLUMNS else ROWS, Q, AWQ != T.COLUMNS, AWQ, HALVES, T)


@triton.jit
def bytes8(x, W, col, begin, end, M, N, K, HOW: tl.constexpr, T: tl.constexpr):
    """A W of 8-bit codes times x (M, K): (BLOCK_N, BLOCK_M). ``COLUMNS``: K counts rows of W."""
    n = col + tl.arange(0, T.N)
    t, slices = tl.arange(0, T.M), tl.arange(0, T.SLICES) * T.K
    k = slices[:, None] + tl.arange(0, T.K)[None, :]
    BY_N: tl.constexpr = HOW.BK if T.COLUMNS else HOW.BN
    BY_K: tl.constexpr = HOW.BN if T.COLUMNS else HOW.BK
    WHOLE: tl.constexpr = BY_N % T.N == 0 and BY_K % T.K == 0
    one = tl.load(W.scales) if HOW.SCALES == "tensor" else 0.0
    by_row = vector(W.scales, n, N)[None, :, None] if HOW.SCALES == "row" and not T.COLUMNS else 0.0
    acc = _zeros(T)
    for k0 in range(begin, end, T.SLICES * T.K):
        at_k = k0 + k
        mask = (n < N)[None, :, None] & (at_k < K)[:, None, :]
        stride_n, stride_k = (W.col, W.row) if T.COLUMNS else (W.row, W.col)
        at_w = W.codes + n[None, :, None].to(tl.int64) * stride_n + at_k[:, None, :].to(tl.int64) * stride_k
        c = tl.load(at_w) if T.EVEN else tl.load(at_w, mask=mask, other=0)
        xt = _tokens(x, t, at_k, M, K, T.EVEN)
        if HOW.SCALES == "tensor":
            scale = one
        elif HOW.SCALES == "row":
            scale = vector(W.scales, at_k, K)[:, None, :] if T.COLUMNS else by_row
        elif WHOLE:  # a slice of the tile lies in one block
            by_n, by_k = col // BY_N, (k0 + slices) // BY_K
            at = by_k * W.groups + by_n if T.COLUMNS else by_n * W.groups + by_k
            scale = tl.load(W.scales + at, mask=k0 + slices < K, other=0.0)[:, None, None]
        else:
            by_n, by_k = (n // BY_N)[None, :, None], (at_k // BY_K)[:, None, :]
            at = by_k * W.groups + by_n if T.COLUMNS else by_n * W.groups + by_k
            scale = tl.load(W.scales + at, mask=mask, other=0.0)
        w = byte_weights(c, scale, HOW)
        acc = _product(acc, w.to(x.p.dtype.element_ty), tl.permute(xt, (0, 2, 1)), T)
    return acc if T.SLICES == 1 else tl.sum(acc, axis=0)
