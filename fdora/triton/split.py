"""float32 factors as float16 ones of three times the rank, so that their product runs at half-precision speed.

Scaled by a power of two until the largest of its row is near 2^15, x = hi + lo to 2^-22 with both in float16, and
b a = b_hi a_hi + b_hi a_lo + b_lo a_hi to 7e-7 of |b| |a| at worst: three float16 products where bfloat16 terms would take
six and tf32 three at half the speed. B is scaled by row and A by column, which the kernel undoes after the sum.
"""

from __future__ import annotations

import torch

from fdora.triton.hash import WORDS
from fdora.triton.kernels.split import split_kernel
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array

BLOCK_P, BLOCK_R = 32, 64
BUDGET = 64 << 20  # most bytes of split factors where the caller sets no limit
Hashes = tuple[Array | None, Array | None]  # the fingerprint of before and that of now: nothing is split where they agree


def split_rank(R: int) -> int:
    """3 R, filled up so that the slabs of the product are whole."""
    return cdiv(3 * R, 32) * 32 if 3 * R <= 64 else cdiv(3 * R, 64) * 64


def rows_at_a_time(N: int, K: int, R: int, max_bytes: int | None, row_bytes: int) -> int:
    """How many rows of B may be split at once beside all of A, and ``row_bytes`` more each; 0 if too few."""
    wide = 2 * split_rank(R)
    left = (BUDGET if max_bytes is None else max_bytes) - (wide + 4) * _padded(K)
    rows = left // (wide + 4 + row_bytes)
    return min(N, rows) if rows >= N else max(0, rows // 128 * 128)


def split_A(plan: Builder, A: Array, hashes: Hashes = (None, None)) -> tuple[Array, Array]:
    """(r, K) -> (split_rank(r), K) float16 and the scale of each column."""
    R, K = A.shape
    out = plan.temp((split_rank(R), K), torch.float16, (_padded(K), 1))
    return out, _split(plan, A.T, out.T, True, hashes)


def split_B(plan: Builder, B: Array, hashes: Hashes = (None, None)) -> tuple[Array, Array]:
    """(N, r) -> (N, split_rank(r)) float16 and the scale of each row."""
    N, R = B.shape
    out = plan.temp((N, split_rank(R)), torch.float16)
    return out, _split(plan, B, out, False, hashes)


def _split(plan: Builder, x: Array, out: Array, lo_first: bool, hashes: Hashes) -> Array:
    P, R = x.shape
    scale = plan.temp((P,), torch.float32)
    given = {"x": x, "out": out, "scale": scale, "P": P, "R": R, "R3": out.shape[1], "LO_FIRST": lo_first, "WORDS": WORDS}
    given |= named("old_hash new_hash", hashes) | named("stride_op stride_or", out.stride)
    plan.launch(split_kernel, (cdiv(P, BLOCK_P),), {**given, "BLOCK_P": BLOCK_P, "BLOCK_R": BLOCK_R})
    return scale


def _padded(K: int) -> int:
    """Rows that begin at 16 bytes, for TMA."""
    return cdiv(K, 8) * 8
