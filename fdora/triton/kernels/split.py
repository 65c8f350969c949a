"""float32 factors as float16 ones of three times the rank; see fdora/triton/split.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.tile import Matrix, addresses, block_on, loaded, put, store, within, zeros
from fdora.triton.runtime.cost import kernel


@triton.jit
def scaling(top):
    """The power of two that brings ``top`` near 2^15, and what undoes it; both are normal numbers."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@kernel("x out scale")
def split_kernel(
    x, out, scale, old_hash, new_hash, P, R, R3, stride_xp, stride_xr, stride_op, stride_or,
    LO_FIRST: tl.constexpr, WORDS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """(P, R) -> (P, R3): hi hi lo, or hi lo hi, then zeros."""
    p, r = block_on(0, BLOCK_P).to(tl.int64), tl.arange(0, BLOCK_R).to(tl.int64)
    x, out = Matrix(x, stride_xp, stride_xr), Matrix(out, stride_op, stride_or)
    end = R
    if old_hash is not None:
        end = 0 if unchanged(old_hash, new_hash, WORDS) else R
    top = zeros(BLOCK_P)
    for r0 in range(0, end, BLOCK_R):
        t = loaded(x, p, r0 + r, P, R)
        top = tl.maximum(top, tl.max(tl.abs(t), axis=1))
    factor, undo = scaling(top)
    put(undo, scale, p, P)
    for r0 in range(0, end, BLOCK_R):
        t = factor[:, None] * loaded(x, p, r0 + r, P, R)
        hi = t.to(tl.float16)
        lo = (t - hi.to(tl.float32)).to(tl.float16)
        mask = within(p, r0 + r, P, R)
        tl.store(addresses(out, p, r0 + r), hi, mask=mask)
        tl.store(addresses(out, p, R + r0 + r), lo if LO_FIRST else hi, mask=mask)
        tl.store(addresses(out, p, 2 * R + r0 + r), hi if LO_FIRST else lo, mask=mask)
    store(tl.zeros((BLOCK_P, BLOCK_R), tl.float16), out, p, 3 * R + r, P, R3)
