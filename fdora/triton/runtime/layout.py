"""Where things lie: pure functions of shapes, strides and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

ALIGN = 256  # bytes: what torch's own allocations begin at


def packed(sizes: list[int], used: list[tuple[int, int]]) -> tuple[list[int], int]:
    """An offset for each temporary, so that no two that are in use at once overlap: largest first, each as low as it fits."""
    placed: list[tuple[int, int, int]] = []  # offset, end, number
    offsets = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        (first, last), at = used[i], 0
        if last < first:  # made and never used
            continue
        for begin, end, j in sorted(placed):
            if used[j][0] <= last and first <= used[j][1] and begin < at + sizes[i] and at < end:
                at = -(-end // ALIGN) * ALIGN
        offsets[i] = at
        placed.append((at, at + sizes[i], i))
    return offsets, max((end for _, end, _ in placed), default=0)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(1, n)
    return tuple(reversed(stride))


def pitch(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The distance of one row from the next."""
    for n, d in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if n != 1:
            return d
    return max(1, shape[-1])


def collapses(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether (..., K) is an (M, K) with adjacent columns."""
    if len(shape) == 1 or prod(shape) == 0:
        return stride == contiguous(shape)
    if stride[-1] != 1 and shape[-1] != 1:
        return False
    step = pitch(shape, stride)
    if step < shape[-1]:  # expanded or overlapping rows
        return False
    for n, d in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if n != 1 and d != step:
            return False
        step *= n
    return True


def is_operand(shape: Sequence[int], stride: Sequence[int]) -> bool:
    (m, n), (a, b) = shape, stride
    return (b == 1 and a >= max(1, n)) or (a == 1 and b >= max(1, m))
