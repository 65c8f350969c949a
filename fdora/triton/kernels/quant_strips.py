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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fdora.triton.kernels.decode import E2M1_LANE, FP4_LANE, NF4_LANE, Codes, e4m3, e8m0, nibble
from fdora.triton.kernels.norm import walk
from fdora.triton.kernels.tile import Matrix, loaded, put
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.lookup import OF_WORDS

TINY = tl.constexpr(2.0**-30)
HUGE = tl.constexpr(2.0**30)
TAKEN = tl.constexpr(OF_WORDS)
FOUR_EACH = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r")


@triton.jit
def _values(x, HOW: tl.constexpr):
    """Those of the low and of the high halves of bytes: of each word's four a lane of a quad takes one, so that it has weights
    of the columns in which wgmma leaves it sums."""
    lane = tl.arange(0, 4)[None, None, None, :]
    TABLE: tl.constexpr = HOW.CODE
    if HOW.PTX:
        LANE: tl.constexpr = NF4_LANE if TABLE == "nf4" else FP4_LANE if TABLE == "fp4" else E2M1_LANE
        value = tl.inline_asm_elementwise(LANE, "=r", [], tl.int32, True, 1)
        x = x[:, :, :, None]
        return tl.inline_asm_elementwise(TAKEN, FOUR_EACH, [x, lane * 17 + 64, value], (tl.float32, tl.float32), True, 4)
    else:
        x = x[:, :, :, None] >> lane * 8
        return nibble(x & 15, TABLE), nibble(x >> 4 & 15, TABLE)


class Strip(NamedTuple):
    """Constants of a tile (N, K) of W and of a rank up to R. ``EVEN``: every tile is whole. ``AHEAD``: stages of the loop.
    ``ONE_SECOND``: a row of a strip has one second scale."""

    N: Any
    K: Any
    R: Any
    EVEN: Any
    AHEAD: Any
    ONE_SECOND: Any


@triton.jit
def _strip4(i, W, A, B, partial, s, first, N, K, R, span, OF: tl.constexpr):
    HOW: tl.constexpr = OF[0]
    T: tl.constexpr = OF[1]
    GROUP: tl.constexpr = HOW.GROUP
    SCALES: tl.constexpr = HOW.SCALES
    IN_TILE: tl.constexpr = T.K // GROUP if T.K > GROUP else 1
    PART: tl.constexpr = T.K // 8 // IN_TILE
    strips = tl.cdiv(K, span)
    strip = i % strips
    n = i // strips * T.N + tl.arange(0, T.N)
    row, in_n = (first + n).to(tl.int64), (n < N)[:, None]
    size = tl.abs(s)
    unit = tl.where(size < TINY, TINY, tl.where(size > HUGE, HUGE, s))
    b = loaded(B, n, tl.arange(0, T.R), N, R)
    if (size < TINY) | (size > HUGE):
        b = (b.to(tl.float32) * (s / unit)).to(b.dtype)
    by = 1.0 / unit
    if SCALES == "e4m3*global":  # code256 is the global scale; to divide by it for each group would be a call
        by *= tl.load(W.code256)
    elif SCALES == "e4m3/global":
        by /= tl.load(W.code256)
    at_x = W.codes + row[:, None] * tl.multiple_of(K // 8, 8) + tl.arange(0, T.K // 8)[None, :]
    begin, end = strip * span, min(K, strip * span + span)
    # Triton copies no single bytes ahead. A nested scale takes two loads, one after the other: its code comes two tiles ahead,
    # what that stands for one.
    at_scale = W.scales + row[:, None] * W.groups + tl.arange(0, IN_TILE)[None, :]
    last = end - T.K
    if SCALES == "nested":
        zero = tl.load(W.offset)
        second = tl.load(W.scales2 + ((row[:, None] * W.groups + begin // GROUP) >> 8), mask=in_n, other=0.0)
        value = tl.load(W.code256 + tl.load(at_scale + begin // GROUP, mask=in_n, other=0).to(tl.int32))
        stored = tl.load(at_scale + min(begin + T.K, last) // GROUP, mask=in_n, other=0)
    elif SCALES != "fp32":
        stored = tl.load(at_scale + begin // GROUP, mask=in_n, other=0)
    squares = tl.zeros((T.N, IN_TILE, PART, 4), tl.float32)
    for k0 in tl.range(begin, end, T.K, num_stages=T.AHEAD):
        word = tl.multiple_of(k0 // 8, T.K // 8)
        x = tl.load(at_x + word) if T.EVEN else tl.load(at_x + word, mask=in_n, other=0)
        acc = tl.reshape(tl.dot(b, A.load([0, k0])), (T.N, IN_TILE, PART, 4, 2))
        if SCALES == "fp32":
            scale = tl.load(at_scale + k0 // GROUP, mask=in_n, other=0.0)
        elif SCALES == "nested":
            if not T.ONE_SECOND:
                at = row[:, None] * W.groups + k0 // GROUP + tl.arange(0, IN_TILE)[None, :]
                second = tl.load(W.scales2 + (at >> 8), mask=in_n, other=0.0)
            scale = tl.fma(value, second, 0.0) + zero
            value = tl.load(W.code256 + stored.to(tl.int32))
            stored = tl.load(at_scale + min(k0 + 2 * T.K, last) // GROUP, mask=in_n, other=0)
        else:
            scale = tl.where(in_n, e8m0(stored), 0.0) if SCALES == "e8m0" else e4m3(stored)
            stored = tl.load(at_scale + min(k0 + T.K, last) // GROUP, mask=in_n, other=0)
        scale *= by
        low, high = _values(tl.reshape(x, (T.N, IN_TILE, PART)), HOW)
        even, odd = tl.split(acc)
        v = (high if HOW.HIGH_FIRST else low) * scale[:, :, None, None] + even
        u = (low if HOW.HIGH_FIRST else high) * scale[:, :, None, None] + odd
        squares += v * v
        squares += u * u
    total = tl.sum(tl.sum(tl.sum(squares, axis=3), axis=2), axis=1) * (unit * unit)
    put(total, partial + strip.to(tl.int64) * N, n, N)


@kernel("codes scales scales2 A B partial dense", "N K R A")
def quant4_strips_kernel(
    codes, scales, code256, scales2, offset, A, B, partial, old_hash, new_hash, s, first, N, K, R, groups, span,
    stride_bn, stride_br,
    HOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, ONE_SECOND: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """N rows from ``first`` on: B and partial begin there, W does not."""
    W = Codes(codes, scales, code256, scales2, offset, groups, None, None)
    of = (W, A, Matrix(B, stride_bn, stride_br), partial, s, first, N, K, R, span)
    T: tl.constexpr = Strip(BLOCK_N, BLOCK_K, BLOCK_R, EVEN, AHEAD, ONE_SECOND)
    count = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, span)
    walk(_strip4, of, (HOW, T), count, old_hash, new_hash, WORDS, False, PDL)
