"""The layer for a handful of tokens, straight from codes; see fdora/triton/small_quant.py.

A tile of the result lies transposed, one row for each column of y: weights are the left operand, which tensor cores take
from registers, where they are decoded. No weight changes registers after that, by one permutation: a product is a sum,
whatever the order of its terms, so a thread's four words of 8 codes are the terms that its place in the operand asks for, and x
is permuted alike. What a thread takes from shared memory is 16 bytes of codes and 16 of x.

4 bits   A group's table is multiplied by its scale first: 16 products rounded to the dtype of x, the same numbers that a
         dense W would hold, in 8 registers of bytes. A word of 8 codes then takes 12 byte permutes for the two planes and 4 to
         pair them up, where float32 weights took 45, 8 products and 4 roundings.
8 bits   A conversion, a product by the scale, half a rounding.

Instructions for each weight, of which a multiprocessor starts 64 a clock (SASS for sm_90, 32 rows, 16 tokens): 2.25 permutes,
0.9 others, half a float32 product; 3.2 against 7.1 by float32. 4096 x 4096 take 3 us at best, and their bytes 1.8.

``SLICES``: warps that share a tile of the result, each with terms of its own, added at the end in a fixed order. Few columns
for each program are what fills the GPU; with one slice all warps would have to share these few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import byte_weights, nibble, scale_of
from fdora.triton.runtime.lookup import PICKED, SCALED

NF4_BF16 = tl.constexpr(SCALED["bf16"]["nf4"])
NF4_F16 = tl.constexpr(SCALED["f16"]["nf4"])
FP4_BF16 = tl.constexpr(SCALED["bf16"]["fp4"])
FP4_F16 = tl.constexpr(SCALED["f16"]["fp4"])
E2M1_BF16 = tl.constexpr(SCALED["bf16"]["e2m1"])
E2M1_F16 = tl.constexpr(SCALED["f16"]["e2m1"])
HIGH = tl.constexpr(PICKED[True])
LOW = tl.constexpr(PICKED[False])
TO_TABLE = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r")
TO_WEIGHTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r")


@triton.jit
def _weights(x, scale, dtype: tl.constexpr, TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, PTX: tl.constexpr):
    """Words of 8 codes, a scale for each -> weights in ``dtype`` on three more axes: number 4 s + 2 h + b at (b, h, s)."""
    if PTX:
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
    codes, scale, n, word, N, words, dtype: tl.constexpr, TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, PTX: tl.constexpr,
    EVEN: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, IN_TILE: tl.constexpr,
):
    """Weights at rows n (SLICES, ROWS) and words (SLICES, WORDS), as above, one more axis for the groups."""
    at = codes + n[:, :, None].to(tl.int64) * words + word[:, None, :]
    x = tl.load(at) if EVEN else tl.load(at, mask=(n < N)[:, :, None] & (word < words)[:, None, :], other=0)
    x = tl.reshape(x, (SLICES, ROWS, IN_TILE, WORDS // IN_TILE))
    each = tl.broadcast_to(scale[:, :, :, None], (SLICES, ROWS, IN_TILE, WORDS // IN_TILE))
    return _weights(x, each, dtype, TABLE, HIGH_FIRST, PTX)


@triton.jit
def _groups(n, first, N, groups, GROUP: tl.constexpr, IN_TILE: tl.constexpr):
    """Numbers of the groups that rows n (SLICES, ROWS) have from columns ``first`` (SLICES,) on, and which there are."""
    g = (first // GROUP)[:, None] + tl.arange(0, IN_TILE)[None, :]
    return n[:, :, None].to(tl.int64) * groups + g[:, None, :], (n < N)[:, :, None] & (g < groups)[:, None, :]


@triton.jit
def _product(acc, w, x, SLICES: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr, TOKENS: tl.constexpr):
    if SLICES == 1:
        return tl.dot(tl.reshape(w, (ROWS, TERMS)), tl.reshape(x, (TERMS, TOKENS)), acc)
    else:
        return tl.dot(tl.reshape(w, (SLICES, ROWS, TERMS)), tl.reshape(x, (SLICES, TERMS, TOKENS)), acc)


@triton.jit
def _zeros(SLICES: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    return tl.zeros((ROWS, TOKENS), tl.float32) if SLICES == 1 else tl.zeros((SLICES, ROWS, TOKENS), tl.float32)


@triton.jit
def rows4(
    x, codes, scales, code256, scales2, offset, col, begin, end, M, N, K, words, groups, stride_xm, stride_xk,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
):
    """Rows of W from ``col`` on times x, terms from ``begin``, a whole step, to ``end``: (BLOCK_N, BLOCK_M)."""
    WORDS: tl.constexpr = BLOCK_K // 8
    IN_TILE: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    J: tl.constexpr = WORDS // 16
    n = tl.broadcast_to((col + tl.arange(0, BLOCK_N))[None, :], (SLICES, BLOCK_N))
    t, k, i = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, SLICES) * BLOCK_K
    c = tl.arange(0, WORDS)
    acc = _zeros(SLICES, BLOCK_N, BLOCK_M)
    # Scales come two steps ahead of the codes they belong to: a nested one takes two loads, one after the other.
    at, mask = _groups(n, begin + i, N, groups, GROUP, IN_TILE)
    scale = scale_of(tl.load(scales + at, mask=mask, other=0), code256, scales2, offset, at, mask, SCALES)
    at, mask = _groups(n, begin + SLICES * BLOCK_K + i, N, groups, GROUP, IN_TILE)
    stored = tl.load(scales + at, mask=mask, other=0)
    for k0 in range(begin, end, SLICES * BLOCK_K):
        at_far, far = _groups(n, k0 + 2 * SLICES * BLOCK_K + i, N, groups, GROUP, IN_TILE)
        after = tl.load(scales + at_far, mask=far, other=0)
        at_next, there = _groups(n, k0 + SLICES * BLOCK_K + i, N, groups, GROUP, IN_TILE)
        next_scale = scale_of(stored, code256, scales2, offset, at_next, there, SCALES)
        first = k0 + i
        w = _tile4(
            codes, scale, n, (first // 8)[:, None] + c[None, :], N, words, x.dtype.element_ty, TABLE, HIGH_FIRST, PTX,
            EVEN, SLICES, BLOCK_N, WORDS, IN_TILE,
        )
        at_k = first[:, None] + k[None, :]
        at_x = x + t[None, :, None].to(tl.int64) * stride_xm + at_k[:, None, :].to(tl.int64) * stride_xk
        xt = tl.load(at_x, mask=(t < M)[None, :, None] & (EVEN | (at_k < K))[:, None, :], other=0.0)
        # Term 16 (4 (4 j + i) + 2 s) + 8 h + 2 q + b is column 128 j + 32 q + 8 i + 4 s + 2 h + b.
        w = tl.permute(tl.reshape(w, (SLICES, BLOCK_N, J, 4, 4, 2, 2, 2)), (0, 1, 2, 4, 7, 6, 3, 5))
        xt = tl.permute(tl.reshape(xt, (SLICES, BLOCK_M, J, 4, 4, 2, 2, 2)), (0, 2, 4, 5, 6, 3, 7, 1))
        acc = _product(acc, w, xt, SLICES, BLOCK_N, BLOCK_K, BLOCK_M)
        scale, stored = next_scale, after
    return acc if SLICES == 1 else tl.sum(acc, axis=0)


@triton.jit
def columns4(
    x, codes, scales, code256, scales2, offset, col, begin, end, M, N, K, words, groups, stride_xm, stride_xk,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
):
    """Columns of W (K, N) from ``col`` on times x (M, K): (BLOCK_N, BLOCK_M). A word is eight rows of the operand here."""
    WORDS: tl.constexpr = BLOCK_N // 8
    IN_TILE: tl.constexpr = BLOCK_N // GROUP if BLOCK_N > GROUP else 1
    # Four warps that multiply as one (wgmma) hold 16 rows of each 64; a word of eight, two to a lane, asks for four times 64.
    TOGETHER: tl.constexpr = SLICES == 1 and WORDS >= 32
    I: tl.constexpr = WORDS // 32 if TOGETHER else 4 if WORDS >= 32 else WORDS // 8  # words in a row that a thread takes
    J: tl.constexpr = WORDS // (8 * I)  # TOGETHER: the four warps
    t, k = tl.arange(0, BLOCK_M), (tl.arange(0, SLICES) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    word = tl.broadcast_to((col // 8 + tl.arange(0, WORDS))[None, :], (SLICES, WORDS))
    first = tl.zeros((SLICES,), tl.int32) + col
    acc = _zeros(SLICES, BLOCK_N, BLOCK_M)
    STEP: tl.constexpr = SLICES * BLOCK_K
    at, mask = _groups(begin + k, first, K, groups, GROUP, IN_TILE)
    scale = scale_of(tl.load(scales + at, mask=mask, other=0), code256, scales2, offset, at, mask, SCALES)
    at, mask = _groups(begin + STEP + k, first, K, groups, GROUP, IN_TILE)
    stored = tl.load(scales + at, mask=mask, other=0)
    for k0 in range(begin, end, STEP):
        at_far, far = _groups(k0 + 2 * STEP + k, first, K, groups, GROUP, IN_TILE)
        after = tl.load(scales + at_far, mask=far, other=0)
        at_next, there = _groups(k0 + STEP + k, first, K, groups, GROUP, IN_TILE)
        next_scale = scale_of(stored, code256, scales2, offset, at_next, there, SCALES)
        at_k = k0 + k
        w = _tile4(
            codes, scale, at_k, word, K, words, x.dtype.element_ty, TABLE, HIGH_FIRST, PTX,
            EVEN, SLICES, BLOCK_K, WORDS, IN_TILE,
        )
        at_x = x + t[None, :, None].to(tl.int64) * stride_xm + at_k[:, None, :].to(tl.int64) * stride_xk
        xt = tl.load(at_x, mask=(t < M)[None, :, None] & (EVEN | (at_k < K))[:, None, :], other=0.0)
        # Row 64 I j + 64 i + 32 s + 16 h + 8 b + l is column 64 I j + 8 I l + 8 i + 4 s + 2 h + b;
        # TOGETHER it is row 256 i + 128 s + 64 h + 16 j + 8 b + l.
        w = tl.reshape(w, (SLICES, BLOCK_K, J, 8, I, 2, 2, 2))
        w = tl.permute(w, (0, 4, 7, 6, 2, 5, 3, 1)) if TOGETHER else tl.permute(w, (0, 2, 4, 7, 6, 5, 3, 1))
        acc = _product(acc, w, tl.permute(xt, (0, 2, 1)), SLICES, BLOCK_N, BLOCK_K, BLOCK_M)
        scale, stored = next_scale, after
    acc = acc if SLICES == 1 else tl.sum(acc, axis=0)
    if TOGETHER:
        acc = tl.permute(tl.reshape(acc, (I, 2, 2, J, 2, 8, BLOCK_M)), (3, 5, 0, 1, 2, 4, 6))
    else:
        acc = tl.permute(tl.reshape(acc, (J, I, 2, 2, 2, 8, BLOCK_M)), (0, 5, 1, 2, 3, 4, 6))
    return tl.reshape(acc, (BLOCK_N, BLOCK_M))


@triton.jit
def bytes8(
    x, codes, scales, col, begin, end, M, N, K, groups, stride_xm, stride_xk, stride_wk, stride_wn,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Codes of 8 bits, (K, N) as the strides say, times x (M, K): (BLOCK_N, BLOCK_M). ``COLUMNS``: K counts rows of W."""
    n = col + tl.arange(0, BLOCK_N)
    t, k = tl.arange(0, BLOCK_M), (tl.arange(0, SLICES) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    BY_N: tl.constexpr = BLOCK_COLUMNS if COLUMNS else BLOCK_ROWS
    BY_K: tl.constexpr = BLOCK_ROWS if COLUMNS else BLOCK_COLUMNS
    WHOLE: tl.constexpr = BY_N % BLOCK_N == 0 and BY_K % BLOCK_K == 0
    one = tl.load(scales) if MODE == "tensor" else 0.0
    by_row = tl.load(scales + n, mask=n < N, other=0.0)[None, :, None] if MODE == "row" and not COLUMNS else 0.0
    acc = _zeros(SLICES, BLOCK_N, BLOCK_M)
    for k0 in range(begin, end, SLICES * BLOCK_K):
        at_k = k0 + k
        mask = (n < N)[None, :, None] & (at_k < K)[:, None, :]
        at_w = codes + n[None, :, None].to(tl.int64) * stride_wn + at_k[:, None, :].to(tl.int64) * stride_wk
        c = tl.load(at_w) if EVEN else tl.load(at_w, mask=mask, other=0)
        at_x = x + t[None, :, None].to(tl.int64) * stride_xm + at_k[:, None, :].to(tl.int64) * stride_xk
        xt = tl.load(at_x, mask=(t < M)[None, :, None] & (EVEN | (at_k < K))[:, None, :], other=0.0)
        if MODE == "tensor":
            scale = one
        elif MODE == "row":
            scale = tl.load(scales + at_k, mask=at_k < K, other=0.0)[:, None, :] if COLUMNS else by_row
        elif WHOLE:  # a slice of the tile lies in one block
            by_n, by_k = col // BY_N, (k0 + tl.arange(0, SLICES) * BLOCK_K) // BY_K
            at = by_k * groups + by_n if COLUMNS else by_n * groups + by_k
            inside = k0 + tl.arange(0, SLICES) * BLOCK_K < K
            scale = tl.load(scales + at, mask=inside, other=0.0)[:, None, None]
        else:
            by_n, by_k = (n // BY_N)[None, :, None], (at_k // BY_K)[:, None, :]
            at = by_k * groups + by_n if COLUMNS else by_n * groups + by_k
            scale = tl.load(scales + at, mask=mask, other=0.0)
        w = byte_weights(c, scale, CODE, BY_BITS)
        acc = _product(acc, w.to(x.dtype.element_ty), tl.permute(xt, (0, 2, 1)), SLICES, BLOCK_N, BLOCK_K, BLOCK_M)
    return acc if SLICES == 1 else tl.sum(acc, axis=0)
