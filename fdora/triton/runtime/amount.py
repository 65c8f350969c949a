"""Flops and bytes, and how they are counted."""

from __future__ import annotations

from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Flops of products, by the width of their operands, and bytes."""

    flops16: float = 0
    flops32: float = 0
    bytes: float = 0
    flops8: float = 0

    @property
    def flops(self) -> float:
        return self.flops8 + self.flops16 + self.flops32

    def __add__(self, other: Any) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def product(M: int, N: int, K: int, operand: Any) -> Cost:
    """(M, K) (K, N), in the dtype of this operand."""
    flops, t = 2.0 * M * N * K, matrix(operand)
    if t.dtype.itemsize == 1:
        return Cost(flops8=flops)
    return Cost(flops16=flops) if t.dtype.itemsize == 2 else Cost(flops32=flops)


def moved(*arrays: Any) -> Cost:
    return Cost(bytes=float(sum(matrix(a).nbytes for a in arrays if a is not None)))


def matrix(a: Any) -> Any:
    """Behind a tensor descriptor, the plan's or Triton's."""
    return getattr(a, "array", None) or getattr(a, "base", a)


# one function for each kernel, of its arguments by name
