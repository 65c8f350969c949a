"""What one product serves many adapters with; see fdora/triton/multi_table.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import adapters_of, g_of_adapter, rank_of
from fdora.triton.kernels.tile import Matrix, addresses, both, put, vector, within
from fdora.triton.runtime.cost import kernel


@triton.jit
def _rows(
    tile, wide, s, ids, offsets, ranks, h, masked, owner, M, G, R, stride_masked,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """Whose each token is, and s_a x A_a^T of that adapter: by itself, and in the columns of all, zeros in the others."""
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_t = t < M
    a = adapters_of(t, ids, offsets, M, G, BLOCK_G)
    tl.store(owner + t, a, mask=in_t)
    sa, rank = vector(s, a, G)[:, None], rank_of(ranks, a, G, R)[:, None]
    at = wide + t[:, None].to(tl.int64) * (G * R)
    q = tl.arange(0, BLOCK_Q)[None, :]
    r, own = q % R, in_t[:, None] & (q // R == tl.minimum(a, G - 1)[:, None])  # of none: zeros in the columns of the last
    ht = (sa * tl.load(at + q, mask=own & (r < rank), other=0.0)).to(h.dtype.element_ty)
    tl.store(h + t[:, None].to(tl.int64) * R + r, ht, mask=own)
    tl.store(addresses(Matrix(masked, stride_masked, None), t, tl.arange(0, BLOCK_Q)), ht, mask=in_t[:, None] & (q < G * R))


@triton.jit
def _columns(
    a, n, b, ranks, m, c, clean, g, G, N, R, stride_ba, stride_bn, stride_br, stride_clean, BLOCK_R: tl.constexpr
):
    """b of an adapter among those of all, and g; what is not finite is a 0 there, and makes a NaN of g."""
    ga = g_of_adapter(m, c, a, n, G, N)
    if a < G:
        r = tl.arange(0, BLOCK_R)
        rank = rank_of(ranks, a, G, R)
        near = both(n < N, (r // 8 * 8 < rank) & (r < R))  # by eights: loads as wide as they can be
        bt = tl.load(addresses(Matrix(b + tl.cast(a, tl.int64) * stride_ba, stride_bn, stride_br), n, r), mask=near, other=0.0)
        bt = tl.where((r < rank)[None, :], bt, 0.0).to(clean.dtype.element_ty)
        bad = bt.to(tl.float32) * 0.0 != 0
        at = addresses(Matrix(clean, stride_clean, None), n, a * R + r)
        tl.store(at, tl.where(bad, 0.0, bt), mask=within(n, r, N, R))
        ga = tl.where(tl.max(bad.to(tl.int32), axis=1) > 0, float("nan"), ga)
    put(ga, g + tl.cast(a, tl.int64) * N, n, N)


@kernel("wide b h masked owner clean g")
def multi_table_kernel(
    wide, s, ids, offsets, ranks, b, m, c, h, masked, owner, clean, g, M, N, G, R, tiles,
    stride_ba, stride_bn, stride_br, stride_masked, stride_clean,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """``wide``: x A_a^T of all adapters beside each other, (M, G R). The first ``tiles`` programs do rows, others B and g."""
    pid = tl.program_id(0)
    if pid < tiles:
        _rows(pid, wide, s, ids, offsets, ranks, h, masked, owner, M, G, R, stride_masked, BLOCK_M, BLOCK_Q, BLOCK_G)
    else:
        across = tl.cdiv(N, BLOCK_N)
        n = (pid - tiles) % across * BLOCK_N + tl.arange(0, BLOCK_N)
        a = (pid - tiles) // across
        _columns(a, n, b, ranks, m, c, clean, g, G, N, R, stride_ba, stride_bn, stride_br, stride_clean, BLOCK_R)
