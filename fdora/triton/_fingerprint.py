"""Whether A, B and s are bit for bit what they were: decided on the GPU, so that no host waits for it.

A word is the wrapping sum of a bijection of each 64 bits and their position (splitmix64's finaliser): integers add in any
order, any change inside one element changes the sum for certain, any other change but for one chance in 2^64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import cdiv, gdc_launch_dependents, launch, overlaps

WORDS = 256  # as in fdora/eager/_fingerprint.py: the first names the kind and s, each other belongs to a program
BLOCK = 2048
KIND = 1  # the eager backend has another: its words never match these
_BITS = {2: torch.int16, 4: torch.int32}


@triton.jit
def _mixed(x, i):
    z = x.to(tl.uint64, bitcast=x.dtype.primitive_bitwidth == 64) + i.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _hash(t, count, cols, stride_row, stride_col, first, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's share of ``count`` words; ``first`` is the position of the first one."""
    acc = tl.zeros((BLOCK,), tl.uint64)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = i if PACKED else (i // cols) * stride_row + (i % cols) * stride_col
        x = tl.load(t + at, mask=i < count, other=0)
        acc += tl.where(i < count, _mixed(x, first + i), 0)
    return tl.sum(acc, axis=0)


@triton.jit
def _fingerprint_kernel(
    A, B, out, s, count_a, count_b, cols_a, cols_b, stride_ar, stride_ak, stride_bn, stride_br,
    PACKED_A: tl.constexpr, PACKED_B: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    word = _hash(A, count_a, cols_a, stride_ar, stride_ak, 0, PACKED_A, BLOCK)
    word += _hash(B, count_b, cols_b, stride_bn, stride_br, 1 << 40, PACKED_B, BLOCK)
    for i in range(1 + tl.program_id(0), WORDS, tl.num_programs(0)):  # small factors have fewer programs than words
        tl.store(out + i, word.to(tl.int64, bitcast=True))
    if tl.program_id(0) == 0:
        bits = (s + tl.zeros((1,), tl.float32)).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(out + tl.arange(0, 1), (tl.full((1,), KIND, tl.int64) << 32) | bits)


@triton.jit
def unchanged(old, new, WORDS: tl.constexpr):
    i = tl.arange(0, WORDS)
    return tl.sum((tl.load(old + i) != tl.load(new + i)).to(tl.int32), axis=0) == 0


def fingerprint(A: Tensor, B: Tensor, s: float) -> Tensor:
    """(WORDS,) int64 of the bits of A, B and s (as the float32 that the norm multiplies with); the first is never 0."""
    out = torch.empty(WORDS, device=A.device, dtype=torch.int64)
    (a, packed_a), (b, packed_b) = _words(A), _words(B)
    kind = KIND + 16 * A.element_size() + 256 * B.element_size()
    programs = min(WORDS - 1, cdiv(max(a.numel(), b.numel(), 1), BLOCK))
    cols_a, row_a, col_a = (1, 1, 1) if packed_a else (a.shape[1], *a.stride())  # where packed nobody reads them
    cols_b, row_b, col_b = (1, 1, 1) if packed_b else (b.shape[1], *b.stride())
    launch(
        _fingerprint_kernel, (programs,),
        (a, b, out, s, a.numel(), b.numel(), cols_a, cols_b, row_a, col_a, row_b, col_b),
        (packed_a, packed_b, BLOCK, kind, WORDS, overlaps(A.device)), 16,
    )  # fmt: skip
    return out


def _words(t: Tensor) -> tuple[Tensor, bool]:
    """As 64-bit words where memory allows it, else one word for each element."""
    if t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0:
        return (t.view(-1) if t.shape[1] * t.element_size() % 8 else t).view(torch.int64), True
    return t.view(_BITS[t.element_size()]), False
