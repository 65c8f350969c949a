"""The row norm of W + s B A for a W of 4-bit codes along strips; see fdora/triton/quant_strips.py.

Codes come in words of eight: those of the eight columns that wgmma leaves to the four lanes of a quad, two to a lane. Each lane
reads every word of its rows, which shared memory sends to all four at once, and takes the byte that has its two columns: none
moves between lanes. What a weight costs: a shift and a shuffle for its value, one fused multiply-add by the scale onto B A, one
for its square, which stays in a register of its own until the strip ends. So s is not multiplied with B A, but divides the
scales: c = |s| || W / s + B A ||. Where s is (nearly) 0, or so large that squares of W / s would be, a power of two takes its
place, and what is left of s goes into B.

A tile of 64 x 64 at r = 64 takes 248 instructions for 32 weights of a thread, 7.8 a weight (SASS for sm_90; single tiles took
10.3): 4 as above, the rest is what a tile costs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import E2M1_LANE, FP4_LANE, NF4_LANE, e4m3, nibble, scale_of
from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.tile import Matrix, loaded
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.lookup import OF_WORDS
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait

TINY = tl.constexpr(2.0**-30)
HUGE = tl.constexpr(2.0**30)
TAKEN = tl.constexpr(OF_WORDS)
FOUR_EACH = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r")


@triton.jit
def _values(x, TABLE: tl.constexpr, PTX: tl.constexpr):
    """Those of the low and of the high halves of bytes: of each word's four a lane of a quad takes one, so that it has weights
    of the columns in which wgmma leaves it sums."""
    lane = tl.arange(0, 4)[None, None, None, :]
    if PTX:
        LANE: tl.constexpr = NF4_LANE if TABLE == "nf4" else FP4_LANE if TABLE == "fp4" else E2M1_LANE
        value = tl.inline_asm_elementwise(LANE, "=r", [], tl.int32, True, 1)
        x = x[:, :, :, None]
        return tl.inline_asm_elementwise(TAKEN, FOUR_EACH, [x, lane * 17 + 64, value], (tl.float32, tl.float32), True, 4)
    else:
        x = x[:, :, :, None] >> lane * 8
        return nibble(x & 15, TABLE), nibble(x >> 4 & 15, TABLE)


@triton.jit
def _strip4(
    i, codes, scales, code256, scales2, offset, A, B, partial, s, first, N, K, R, groups, span,
    stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    ONE_SECOND: tl.constexpr,
):
    IN_TILE: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
    PART: tl.constexpr = BLOCK_K // 8 // IN_TILE
    strips = tl.cdiv(K, span)
    strip = i % strips
    n = i // strips * BLOCK_N + tl.arange(0, BLOCK_N)
    row, in_n = (first + n).to(tl.int64), (n < N)[:, None]
    size = tl.abs(s)
    unit = tl.where(size < TINY, TINY, tl.where(size > HUGE, HUGE, s))
    b = loaded(Matrix(B, stride_bn, stride_br), n, tl.arange(0, BLOCK_R), N, R)
    if (size < TINY) | (size > HUGE):
        b = (b.to(tl.float32) * (s / unit)).to(b.dtype)
    by = 1.0 / unit
    if SCALES == "e4m3*global":  # code256 is the global scale; to divide by it for each group would be a call
        by *= tl.load(code256)
    elif SCALES == "e4m3/global":
        by /= tl.load(code256)
    at_x = codes + row[:, None] * tl.multiple_of(K // 8, 8) + tl.arange(0, BLOCK_K // 8)[None, :]
    begin, end = strip * span, min(K, strip * span + span)
    # Triton copies no single bytes ahead. A nested scale takes two loads, one after the other: its code comes two tiles ahead,
    # what that stands for one.
    at_scale = scales + row[:, None] * groups + tl.arange(0, IN_TILE)[None, :]
    last = end - BLOCK_K
    if SCALES == "nested":
        zero = tl.load(offset)
        second = tl.load(scales2 + ((row[:, None] * groups + begin // GROUP_SIZE) >> 8), mask=in_n, other=0.0)
        value = tl.load(code256 + tl.load(at_scale + begin // GROUP_SIZE, mask=in_n, other=0).to(tl.int32))
        stored = tl.load(at_scale + min(begin + BLOCK_K, last) // GROUP_SIZE, mask=in_n, other=0)
    elif SCALES != "fp32":
        stored = tl.load(at_scale + begin // GROUP_SIZE, mask=in_n, other=0)
    squares = tl.zeros((BLOCK_N, IN_TILE, PART, 4), tl.float32)
    for k0 in tl.range(begin, end, BLOCK_K, num_stages=AHEAD):
        word = tl.multiple_of(k0 // 8, BLOCK_K // 8)
        x = tl.load(at_x + word) if EVEN else tl.load(at_x + word, mask=in_n, other=0)
        acc = tl.reshape(tl.dot(b, A.load([0, k0])), (BLOCK_N, IN_TILE, PART, 4, 2))
        if SCALES == "fp32":
            scale = tl.load(at_scale + k0 // GROUP_SIZE, mask=in_n, other=0.0)
        elif SCALES == "nested":
            if not ONE_SECOND:
                at = row[:, None] * groups + k0 // GROUP_SIZE + tl.arange(0, IN_TILE)[None, :]
                second = tl.load(scales2 + (at >> 8), mask=in_n, other=0.0)
            scale = tl.fma(value, second, 0.0) + zero
            value = tl.load(code256 + stored.to(tl.int32))
            stored = tl.load(at_scale + min(k0 + 2 * BLOCK_K, last) // GROUP_SIZE, mask=in_n, other=0)
        else:
            scale = scale_of(stored, None, None, None, None, in_n, "e8m0") if SCALES == "e8m0" else e4m3(stored)
            stored = tl.load(at_scale + min(k0 + BLOCK_K, last) // GROUP_SIZE, mask=in_n, other=0)
        scale *= by
        low, high = _values(tl.reshape(x, (BLOCK_N, IN_TILE, PART)), TABLE, PTX)
        even, odd = tl.split(acc)
        v = (high if HIGH_FIRST else low) * scale[:, :, None, None] + even
        u = (low if HIGH_FIRST else high) * scale[:, :, None, None] + odd
        squares += v * v
        squares += u * u
    total = tl.sum(tl.sum(tl.sum(squares, axis=3), axis=2), axis=1) * (unit * unit)
    tl.store(partial + strip.to(tl.int64) * N + n, total, mask=n < N)


@triton.jit(launch_metadata=launched)
def quant4_strips_kernel(
    codes, scales, code256, scales2, offset, A, B, partial, old_hash, new_hash, s, first, N, K, R, groups, span,
    stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    ONE_SECOND: tl.constexpr,
    GUARDED: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """N rows from ``first`` on: B and partial begin there, W does not."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if GUARDED:
        count = tl.where(unchanged(old_hash, new_hash, WORDS), 0, tl.cdiv(N, BLOCK_N) * tl.cdiv(K, span))
        for i in tl.range(tl.program_id(0), count, tl.num_programs(0)):
            _strip4(
                i, codes, scales, code256, scales2, offset, A, B, partial, s, first, N, K, R, groups, span,
                stride_bn, stride_br,
                TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, PTX, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, AHEAD, ONE_SECOND,
            )
    else:
        _strip4(
            tl.program_id(0), codes, scales, code256, scales2, offset, A, B, partial, s, first, N, K, R, groups, span,
            stride_bn, stride_br,
            TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, PTX, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, AHEAD, ONE_SECOND,
        )
