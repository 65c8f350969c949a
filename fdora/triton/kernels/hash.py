"""A hash of the bits of A, B and s; see fdora/triton/hash.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_launch_dependents


@triton.jit
def mixed(x, i):
    z = x.to(tl.uint64, bitcast=x.dtype.primitive_bitwidth == 64) + i.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def hashed_between(
    p, begin, end, step, cols, stride_row, stride_col, first, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Of BLOCK words at ``begin``, a step further, and so on; ``first`` is the position of the first one of all."""
    acc = tl.zeros((BLOCK,), tl.uint64)
    for start in range(begin, end, step):
        i = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = i if PACKED else (i // cols) * stride_row + (i % cols) * stride_col
        x = tl.load(p + at, mask=i < end, other=0)
        acc += tl.where(i < end, mixed(x, first + i), 0)
    return tl.sum(acc, axis=0)


@kernel("A B out")
def hash_kernel(
    A, B, out, s, count_a, count_b, cols_a, cols_b, stride_ar, stride_ak, stride_bn, stride_br,
    PACKED_A: tl.constexpr, PACKED_B: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    part, parts = tl.program_id(0), tl.num_programs(0)
    begin, step = part * BLOCK, parts * BLOCK
    word = hashed_between(A, begin, count_a, step, cols_a, stride_ar, stride_ak, 0, PACKED_A, BLOCK)
    word += hashed_between(B, begin, count_b, step, cols_b, stride_bn, stride_br, 1 << 40, PACKED_B, BLOCK)
    for i in range(1 + part, WORDS, parts):  # small factors have fewer programs than words
        tl.store(out + i, word.to(tl.int64, bitcast=True))
    if part == 0:
        bits = (s + zeros(1)).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(out + tl.arange(0, 1), (tl.full((1,), KIND, tl.int64) << 32) | bits)


@triton.jit
def unchanged(old, new, WORDS: tl.constexpr):
    i = tl.arange(0, WORDS)
    return tl.sum((tl.load(old + i) != tl.load(new + i)).to(tl.int32), axis=0) == 0
