"""Whether A, B and s are bit for bit what they were: a hash of each, in integers, which add up the same in any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._torch import functorch_active

WORDS = 256  # the shape of a kernel's; here one says which code wrote it, then A, B and s, and the rest is 0
KIND = 2
FLIP = 0x5A
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(A: Tensor, B: Tensor, s: float, max_bytes: int) -> Tensor:
    """(WORDS,) int64; the first word is never 0."""
    scale = torch.full((), s, device=A.device, dtype=torch.float64).view(torch.int64)
    kind = torch.full_like(scale, KIND + 16 * A.element_size() + 256 * B.element_size())
    words = torch.stack([kind, _hash(A, max_bytes), _hash(B, max_bytes), scale])
    return torch.cat([words, words.new_zeros(WORDS - 4)])


def _hash(t: Tensor, max_bytes: int) -> Tensor:
    """The wrapping sum of a bijection of each element and its position, splitmix64's finaliser."""
    rows, cols = t.shape
    total = torch.zeros((), device=t.device, dtype=torch.int64)
    bits = Bits.apply(t) if functorch_active() else t.view(_BITS[t.element_size()])
    step = max(1, max_bytes // (40 * max(1, cols)))  # rows at a time: five words for each element
    for i in range(0, rows, step):
        part = bits[i : i + step].to(torch.int64)
        # The xor makes data of it: Inductor would write a multiple of an index as a literal that Triton takes for 32 bits.
        at = torch.arange(i * cols, i * cols + part.numel(), device=t.device).view(part.shape) ^ FLIP
        z = part + at * -0x61C8864680B583EB
        z = (z ^ _right(z, 30)) * -0x40A7B892E31B1A47
        z = (z ^ _right(z, 27)) * -0x6B2FB644ECCEEE15
        total = total + (z ^ _right(z, 31)).sum()
    return total


class Bits(torch.autograd.Function):
    """The bits of a float tensor as integers, under torch.func.vmap, where torch before 2.13 cannot view."""

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return t.view(_BITS[t.element_size()])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, t: Tensor) -> tuple[Tensor, int | None]:
        return Bits.apply(t), in_dims[0]


def _right(z: Tensor, n: int) -> Tensor:
    """Shifted right with zeros from the left; torch repeats the sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)
