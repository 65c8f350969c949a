"""float32 factors as float16 ones of three times the rank, so that their product runs at half-precision speed.

Scaled by a power of two until the largest of its row is near 2^15, x = hi + lo to 2^-22 with both in float16, and
b a = b_hi a_hi + b_hi a_lo + b_lo a_hi to 7e-7 of |b| |a| at worst: three float16 products where bfloat16 terms would take
six and tf32 three at half the speed. B is scaled by row and A by column, which the kernel undoes after the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fdora.triton.copy import in_dtype
from fdora.triton.hash import UNGUARDED, Guard
from fdora.triton.kernels.split import split_kernel
from fdora.triton.runtime import Array, Builder, cdiv, named
from fdora.triton.tiles.configs import MAX_N

TILE = {"BLOCK_P": 32, "BLOCK_R": 64}
BUDGET = 64 << 20  # most bytes of split factors where the caller sets no limit


class Factors(NamedTuple):
    """All of A, rows of B, and what they were scaled by where they were split."""

    A: Array
    B: Array
    scale_n: Array | None
    scale_k: Array | None


def by_rows(
    plan: Builder, A: Array, B: Array, guard: Guard = UNGUARDED, max_bytes: int | None = None, row_bytes: int = 0
) -> Iterator[tuple[int, int, Factors]]:
    """Rows of B from one to another, with A, as products take them. As many at once as ``max_bytes`` leaves room for, beside
    ``row_bytes`` more each."""
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = in_dtype(plan, A, torch.float32), in_dtype(plan, B, torch.float32)
    (N, R), K = B.shape, A.shape[1]
    rows = 0 if A.itemsize == 2 else rows_at_a_time(N, K, R, max_bytes, row_bytes)
    split = rows > 0
    if not split:
        rows = N if max_bytes is None else max(MAX_N, max_bytes // row_bytes)
    a, scale_k = split_A(plan, A, guard) if split else (A, None)
    for i in range(0, N, max(1, rows)):
        part = B.rows(i, i + rows)
        b, scale_n = split_B(plan, part, guard) if split else (part, None)
        yield i, i + rows, Factors(a, b, scale_n, scale_k)


def split_rank(R: int) -> int:
    """3 R, filled up so that the slabs of the product are whole."""
    return cdiv(3 * R, 32) * 32 if 3 * R <= 64 else cdiv(3 * R, 64) * 64


def rows_at_a_time(N: int, K: int, R: int, max_bytes: int | None, row_bytes: int) -> int:
    """How many rows of B may be split at once beside all of A, and ``row_bytes`` more each; 0 if too few."""
    wide = 2 * split_rank(R)
    left = (BUDGET if max_bytes is None else max_bytes) - (wide + 4) * _padded(K)
    rows = left // (wide + 4 + row_bytes)
    return min(N, rows) if rows >= N else max(0, rows // 128 * 128)


def split_A(plan: Builder, A: Array, guard: Guard = UNGUARDED) -> tuple[Array, Array]:
    """(r, K) -> (split_rank(r), K) float16 and the scale of each column."""
    R, K = A.shape
    out = plan.temp((split_rank(R), K), torch.float16, (_padded(K), 1))
    return out, _split(plan, A.T, out.T, True, guard)


def split_B(plan: Builder, B: Array, guard: Guard = UNGUARDED) -> tuple[Array, Array]:
    """(N, r) -> (N, split_rank(r)) float16 and the scale of each row."""
    N, R = B.shape
    out = plan.temp((N, split_rank(R)), torch.float16)
    return out, _split(plan, B, out, False, guard)


def _split(plan: Builder, x: Array, out: Array, lo_first: bool, guard: Guard) -> Array:
    P, R = x.shape
    scale = plan.temp((P,))
    given = {"x": x, "out": out, "scale": scale, "P": P, "R": R, "R3": out.shape[1], "LO_FIRST": lo_first}
    plan.launch(split_kernel, "P", given | named("stride_op stride_or", out.stride), guard, TILE)
    return scale


def _padded(K: int) -> int:
    """Rows that begin at 16 bytes, for TMA."""
    return cdiv(K, 8) * 8
