"""The row norm of W + s B A for a W of 4-bit codes along strips; see fdora/triton/quant.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import E2M1_LANE, FP4_LANE, NF4_LANE, e4m3, nibble, scale_of
from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.tile import slab_of_A, slab_of_B
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait

TINY = tl.constexpr(2.0**-30)
TAKE = tl.constexpr("shfl.sync.idx.b32 $0, $2, $1, 0x100f, 0xffffffff;")


@triton.jit
def _values(x, TABLE: tl.constexpr, PTX: tl.constexpr):
    """Those of the lower four bits."""
    if PTX:
        LANE: tl.constexpr = NF4_LANE if TABLE == "nf4" else FP4_LANE if TABLE == "fp4" else E2M1_LANE
        value = tl.inline_asm_elementwise(LANE, "=r", [], tl.int32, True, 1)
        return tl.inline_asm_elementwise(TAKE, "=r,r,r", [x, value], tl.float32, True, 1)
    else:
        return nibble(x & 15, TABLE)


@triton.jit
def _strip4(
    i, codes, scales, code256, scales2, offset, A, B, partial, s, first, N, K, R, groups, span,
    stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    STEPS: tl.constexpr, ONE_SECOND: tl.constexpr,
):
    IN_TILE: tl.constexpr = BLOCK_K // GROUP_SIZE if BLOCK_K > GROUP_SIZE else 1
    PART: tl.constexpr = BLOCK_K // 8 // IN_TILE
    strips = tl.cdiv(K, span)
    strip = i % strips
    n = i // strips * BLOCK_N + tl.arange(0, BLOCK_N)
    row, in_n = (first + n).to(tl.int64), (n < N)[:, None]
    unit = tl.where(tl.abs(s) < TINY, TINY, s)
    b = slab_of_B(B, n, N, R, stride_bn, stride_br, BLOCK_R, EVEN)
    if tl.abs(s) < TINY:
        b = (b.to(tl.float32) * (s / unit)).to(b.dtype)
    by = 1.0 / unit
    if SCALES == "e4m3*global":  # code256 is the global scale; to divide by it for each group would be a call
        by *= tl.load(code256)
    elif SCALES == "e4m3/global":
        by /= tl.load(code256)
    # Of a word's four bytes each lane of a quad takes one, of its two halves one for each column: as wgmma leaves its sums.
    quad, half = tl.arange(0, 4) * 8, tl.arange(0, 2) * 4 ^ (4 if HIGH_FIRST else 0)
    shift = quad[None, None, None, :, None] + half[None, None, None, None, :]
    at_x = codes + row[:, None] * tl.multiple_of(K // 8, 8) + tl.arange(0, BLOCK_K // 8)[None, :]
    begin, end = strip * span, min(K, strip * span + span)
    # Scales of one byte come in words of four: Triton copies no less ahead, and what is on its way to registers holds up the
    # fence that stands before each product.
    TOGETHER: tl.constexpr = SCALES != "fp32" and IN_TILE * STEPS == 4 and GROUP_SIZE <= BLOCK_K
    at_four = scales + row[:, None] * (groups // 4)
    if SCALES == "nested":
        zero = tl.load(offset)
        second = tl.load(scales2 + ((row[:, None] * groups + begin // GROUP_SIZE) >> 8), mask=in_n, other=0.0)
    squares = tl.zeros((BLOCK_N, IN_TILE, PART, 4), tl.float32)
    for k0 in tl.range(begin, end, STEPS * BLOCK_K, num_stages=AHEAD):
        if TOGETHER:
            four = tl.load(at_four + k0 // (4 * GROUP_SIZE), mask=in_n, other=0)
        for step in tl.static_range(STEPS):
            first_k = k0 + step * BLOCK_K
            word = tl.multiple_of(first_k // 8, BLOCK_K // 8)
            x = tl.load(at_x + word) if EVEN else tl.load(at_x + word, mask=in_n, other=0)
            a = slab_of_A(A, first_k + tl.arange(0, BLOCK_K), K, R, stride_ar, stride_ak, BLOCK_R, EVEN)
            acc = tl.reshape(tl.dot(b, a), (BLOCK_N, IN_TILE, PART, 4, 2))
            at = row[:, None] * groups + first_k // GROUP_SIZE + tl.arange(0, IN_TILE)[None, :]
            if SCALES == "fp32":
                scale = tl.load(scales + at, mask=in_n, other=0.0)
            else:
                if TOGETHER:
                    byte = four >> (step * IN_TILE + tl.arange(0, IN_TILE)) * 8
                else:
                    g = first_k // GROUP_SIZE
                    four = tl.load(at_four + g // 4, mask=in_n, other=0)
                    byte = four >> (g % 4 + tl.arange(0, IN_TILE)[None, :]) * 8
                if SCALES == "nested":
                    if not ONE_SECOND:
                        second = tl.load(scales2 + (at >> 8), mask=in_n, other=0.0)
                    value = tl.load(code256 + (byte & 255), mask=in_n, other=0.0)
                    scale = tl.fma(value, second, 0.0) + zero
                elif SCALES == "e8m0":
                    scale = scale_of(byte & 255, None, None, None, None, in_n, SCALES)
                else:
                    scale = e4m3(byte)
            scale *= by
            x = tl.reshape(x, (BLOCK_N, IN_TILE, PART))[:, :, :, None, None]
            v = _values(x >> shift, TABLE, PTX) * scale[:, :, None, None, None] + acc
            v, u = tl.split(v)
            squares += v * v
            squares += u * u
    total = tl.sum(tl.sum(tl.sum(squares, axis=3), axis=2), axis=1) * (unit * unit)
    tl.store(partial + strip.to(tl.int64) * N + n, total, mask=n < N)


@triton.jit(launch_metadata=launched)
def quant4_strips_kernel(
    codes, scales, code256, scales2, offset, A, B, partial, old_hash, new_hash, s, first, N, K, R, groups, span,
    stride_ar, stride_ak, stride_bn, stride_br,
    TABLE: tl.constexpr, HIGH_FIRST: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    STEPS: tl.constexpr, ONE_SECOND: tl.constexpr,
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
                stride_ar, stride_ak, stride_bn, stride_br,
                TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, PTX, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, AHEAD, STEPS, ONE_SECOND,
            )
    else:
        _strip4(
            tl.program_id(0), codes, scales, code256, scales2, offset, A, B, partial, s, first, N, K, R, groups, span,
            stride_ar, stride_ak, stride_bn, stride_br,
            TABLE, HIGH_FIRST, GROUP_SIZE, SCALES, PTX, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, AHEAD, STEPS, ONE_SECOND,
        )
