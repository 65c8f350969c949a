"""Tokens sorted by adapter, by counting; see fdora/triton/multi_route.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.runtime.cost import launched


@triton.jit
def _keys(ids, t, M, G):
    """The adapter of each token, G for none; behind the last token more than any."""
    a = tl.load(ids + t, mask=t < M, other=0).to(tl.int64)
    return tl.where(t < M, tl.where((a < 0) | (a >= G), G, a), G + 1)


@triton.jit(launch_metadata=launched)
def multi_route_kernel(ids, offsets, order, place, M, G, parts, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """order: the tokens of the first adapter in their order, then those of the next. place: where each token is there.
    offsets: where each adapter ends."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK_T)
    count = tl.zeros((BLOCK_T,), tl.int32)
    if pid < parts:
        t = pid * BLOCK_T + i
        mine = _keys(ids, t, M, G)
        for s0 in range(0, M, BLOCK_S):
            s = s0 + tl.arange(0, BLOCK_S)
            theirs = _keys(ids, s, M, G)
            before = (theirs[None, :] < mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (s[None, :] < t[:, None]))
            count += tl.sum(before.to(tl.int32), axis=1)
        tl.store(order + count, t.to(tl.int64), mask=t < M)
        tl.store(place + t, count.to(tl.int64), mask=t < M)
    else:
        a = (pid - parts) * BLOCK_T + i
        for s0 in range(0, M, BLOCK_S):
            theirs = _keys(ids, s0 + tl.arange(0, BLOCK_S), M, G)
            count += tl.sum(((theirs[None, :] <= a[:, None]) & (theirs[None, :] < G)).to(tl.int32), axis=1)
        tl.store(offsets + a, count, mask=a < G)
