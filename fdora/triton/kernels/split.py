"""float32 factors as float16 ones of three times the rank; see fdora/triton/split.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.hash import unchanged
from fdora.triton.runtime.cost import launched


@triton.jit
def scaling(top):
    """The power of two that brings ``top`` near 2^15, and what undoes it; both are normal numbers."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit(launch_metadata=launched)
def split_kernel(
    x, out, scale, old_hash, new_hash, P, R, R3, stride_xp, stride_xr, stride_op, stride_or,
    LO_FIRST: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """(P, R) -> (P, R3): hi hi lo, or hi lo hi, then zeros."""
    p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    end = R
    if GUARDED:
        end = 0 if unchanged(old_hash, new_hash, WORDS) else R
    top = tl.zeros((BLOCK_P,), tl.float32)
    for r0 in range(0, end, BLOCK_R):
        at = x + p[:, None] * stride_xp + (r0 + r)[None, :] * stride_xr
        t = tl.load(at, mask=(p < P)[:, None] & (r0 + r < R)[None, :], other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(t), axis=1))
    factor, undo = scaling(top)
    tl.store(scale + p, undo, mask=p < P)
    row = out + p[:, None] * stride_op
    for r0 in range(0, end, BLOCK_R):
        mask = (p < P)[:, None] & (r0 + r < R)[None, :]
        t = factor[:, None] * tl.load(x + p[:, None] * stride_xp + (r0 + r)[None, :] * stride_xr, mask=mask, other=0.0)
        hi = t.to(tl.float16)
        lo = (t - hi.to(tl.float32)).to(tl.float16)
        tl.store(row + (r0 + r)[None, :] * stride_or, hi, mask=mask)
        tl.store(row + (R + r0 + r)[None, :] * stride_or, lo if LO_FIRST else hi, mask=mask)
        tl.store(row + (2 * R + r0 + r)[None, :] * stride_or, hi if LO_FIRST else lo, mask=mask)
    mask = (p < P)[:, None] & (3 * R + r < R3)[None, :]
    tl.store(row + (3 * R + r)[None, :] * stride_or, tl.zeros((BLOCK_P, BLOCK_R), tl.float16), mask=mask)
