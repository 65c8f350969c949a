"""float32 factors as float16 ones of three times the rank, so that their product runs at half-precision speed.

Scaled by a power of two until the largest of its row is near 2^15, x = hi + lo to 2^-22 with both in float16, and
b a = b_hi a_hi + b_hi a_lo + b_lo a_hi to 7e-7 of |b| |a| at worst: three float16 products where bfloat16 terms would take
six and tf32 three at half the speed. B is scaled by row and A by column, which the kernel undoes after the sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._fingerprint import WORDS, unchanged
from fdora.triton._launch import cdiv, launch

BLOCK_P, BLOCK_R = 32, 64
BUDGET = 64 << 20  # most bytes of split factors where the caller sets no limit


@triton.jit
def _split_kernel(
    x, out, scale, seen, now, P, R, R3, stride_xp, stride_xr, stride_op, stride_or,
    LO_FIRST: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(P, R) -> (P, R3): hi hi lo, or hi lo hi, then zeros."""
    p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    end = R
    if GUARDED:
        end = 0 if unchanged(seen, now, WORDS) else R
    top = tl.zeros((BLOCK_P,), tl.float32)
    for r0 in range(0, end, BLOCK_R):
        at = x + p[:, None] * stride_xp + (r0 + r)[None, :] * stride_xr
        t = tl.load(at, mask=(p < P)[:, None] & (r0 + r < R)[None, :], other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(t), axis=1))
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(tl.maximum(268 - exponent, 1), 253)  # of the factor; what undoes it is a normal number too
    factor = (up << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(scale + p, ((254 - up) << 23).to(tl.float32, bitcast=True), mask=p < P)
    row = out + p[:, None] * stride_op
    for r0 in range(0, end, BLOCK_R):
        mask = (p < P)[:, None] & (r0 + r < R)[None, :]
        t = factor * tl.load(x + p[:, None] * stride_xp + (r0 + r)[None, :] * stride_xr, mask=mask, other=0.0)
        hi = t.to(tl.float16)
        lo = (t - hi.to(tl.float32)).to(tl.float16)
        tl.store(row + (r0 + r)[None, :] * stride_or, hi, mask=mask)
        tl.store(row + (R + r0 + r)[None, :] * stride_or, lo if LO_FIRST else hi, mask=mask)
        tl.store(row + (2 * R + r0 + r)[None, :] * stride_or, hi if LO_FIRST else lo, mask=mask)
    mask = (p < P)[:, None] & (3 * R + r < R3)[None, :]
    tl.store(row + (3 * R + r)[None, :] * stride_or, tl.zeros((BLOCK_P, BLOCK_R), tl.float16), mask=mask)


def split_rank(R: int) -> int:
    """3 R, filled up so that the slabs of the product are whole."""
    return cdiv(3 * R, 32) * 32 if 3 * R <= 64 else cdiv(3 * R, 64) * 64


def rows_at_a_time(N: int, K: int, R: int, max_bytes: int | None, row_bytes: int) -> int:
    """How many rows of B may be split at once beside all of A, and ``row_bytes`` more each; 0 if too few."""
    wide = 2 * split_rank(R)
    left = (BUDGET if max_bytes is None else max_bytes) - (wide + 4) * _padded(K)
    rows = left // (wide + 4 + row_bytes)
    return min(N, rows) if rows >= N else max(0, rows // 128 * 128)


def split_A(A: Tensor, guard: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(r, K) -> (split_rank(r), K) float16 and the scale of each column."""
    R, K = A.shape
    out = torch.empty((split_rank(R), _padded(K)), device=A.device, dtype=torch.float16)[:, :K]
    return out, _split(A.T, out.T, True, guard)


def split_B(B: Tensor, guard: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(N, r) -> (N, split_rank(r)) float16 and the scale of each row."""
    N, R = B.shape
    out = torch.empty((N, split_rank(R)), device=B.device, dtype=torch.float16)
    return out, _split(B, out, False, guard)


def _split(x: Tensor, out: Tensor, lo_first: bool, guard: tuple[Tensor, Tensor] | None) -> Tensor:
    P, R = x.shape
    scale = torch.empty(P, device=x.device, dtype=torch.float32)
    seen, now = guard or (None, None)
    if P:
        launch(
            _split_kernel, (cdiv(P, BLOCK_P),), (x, out, scale, seen, now, P, R, out.shape[1], *x.stride(), *out.stride()),
            (lo_first, guard is not None, WORDS, BLOCK_P, BLOCK_R), 4,
        )  # fmt: skip
    return scale


def _padded(K: int) -> int:
    """Rows that begin at 16 bytes, for TMA."""
    return cdiv(K, 8) * 8
