"""Tokens sorted by adapter, by counting; see fdora/triton/multi_rows.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import valid
from fdora.triton.kernels.tile import block_on, both, put, vector
from fdora.triton.runtime.cost import kernel


@triton.jit
def _keys(ids, t, M, G):
    """The adapter of each token, G for none; behind the last token more than any."""
    return tl.where(t < M, valid(vector(ids, t, M), G), G + 1)


@kernel("ids counts")
def multi_count_kernel(ids, counts, M, G, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """How many tokens of each block are whose, G for none: (blocks, G + 1)."""
    mine, a = _keys(ids, block_on(0, BLOCK_T), M, G), block_on(1, BLOCK_G)
    count = tl.sum((mine[:, None] == a[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * (G + 1) + a, count, mask=a <= G)


@kernel("ids counts offsets order place")
def multi_route_kernel(
    ids, counts, offsets, order, place, M, G, blocks, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr
):
    """order: the tokens of the first adapter in their order, then those of the next. place: where each token is there.
    offsets: where each adapter ends."""
    t = block_on(0, BLOCK_T)
    mine, s = _keys(ids, t, M, G), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.sum(((_keys(ids, s, M, G)[None, :] == mine[:, None]) & (s[None, :] < t[:, None])).to(tl.int32), axis=1)
    ahead = tl.program_id(0) * 0
    for a0 in range(0, G + 1, BLOCK_G):
        a = a0 + tl.arange(0, BLOCK_G)
        total, before = tl.zeros((BLOCK_G,), tl.int32), tl.zeros((BLOCK_G,), tl.int32)
        for b0 in range(0, blocks, BLOCK_B):
            b = b0 + tl.arange(0, BLOCK_B)
            count = tl.load(counts + b[:, None] * (G + 1) + a[None, :], mask=both(b < blocks, a <= G), other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where((b < tl.program_id(0))[:, None], count, 0), axis=0)
        ends = ahead + tl.cumsum(total, axis=0)
        at += tl.sum(tl.where(mine[:, None] == a[None, :], (ends - total + before)[None, :], 0), axis=1)
        if tl.program_id(0) == 0:
            put(ends, offsets, a, G)
        ahead += tl.sum(total, axis=0)
    tl.store(order + at, t.to(tl.int64), mask=t < M)
    put(at.to(tl.int64), place, t, M)
