"""A handful of tokens of many adapters (decoding); see fdora/triton/multi_small.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import adapter_of, adapters_of, g_of_adapter, rank_of
from fdora.triton.kernels.product import products
from fdora.triton.kernels.small import shrunk
from fdora.triton.kernels.tile import Matrix, block_on, both, loaded, put, store, vector, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def _together(first, ids, offsets, M, G, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """The adapter of this token, which of all tokens are its own, and whether this one is the first of them."""
    a, t = adapter_of(first, ids, offsets, M, G, BLOCK_G), tl.arange(0, BLOCK_T)
    mine = (adapters_of(t, ids, offsets, M, G, BLOCK_G) == a) & (t < M)
    return a, mine, tl.min(tl.where(mine, t, M), axis=0) == first


@kernel("x f part", "M R K x")
def multi_shrink_kernel(
    x, f, ids, offsets, ranks, part, M, G, K, R, span, stride_xm, stride_xk, stride_fa, stride_fk, stride_fr,
    PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """Parts of x f_a. The program of the first token of an adapter does all of them."""
    if PDL:
        gdc_launch_dependents()
    a, mine, is_first = _together(tl.program_id(0), ids, offsets, M, G, BLOCK_T, BLOCK_G)
    rank = rank_of(ranks, a, G, R)
    x, own = Matrix(x, stride_xm, stride_xk), Matrix(f + tl.cast(a, tl.int64) * stride_fa, stride_fk, stride_fr)
    r, begin = block_on(1, BLOCK_R), tl.program_id(2) * span
    end = tl.where(tl.program_id(1) * BLOCK_R < rank, tl.minimum(begin + span, K), begin)
    if is_first & (a < G):
        t = tl.arange(0, BLOCK_T)
        # Not up to end, which is only known here and would make these loads as narrow as one number.
        acc = shrunk(x, own, tl.where(mine, t, M), r, begin, end, M, K, rank, BLOCK_K)
        at = part + (tl.program_id(2) * M + t)[:, None] * R + r[None, :]
        tl.store(at, acc, mask=both(mine, r < R))


@kernel("part b m c h lora g", "M N R h")
def multi_expand_kernel(
    part, s, b, m, c, ids, offsets, ranks, h, lora, g, M, G, N, R, stride_ba, stride_br, stride_bn,
    PARTS: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """h = s_a times the sum of the parts, h b_a and g of each token in float32; zeros and ones without an adapter."""
    if PDL:
        gdc_launch_dependents()
    a, mine, is_first = _together(tl.program_id(1), ids, offsets, M, G, BLOCK_T, BLOCK_G)
    rank = rank_of(ranks, a, G, R)
    n, r = block_on(0, BLOCK_N), tl.arange(0, BLOCK_R)
    sa = vector(s, a, G)
    if PDL:
        gdc_wait()
    if is_first:
        ga, t = g_of_adapter(m, c, a, n, G, N), tl.arange(0, BLOCK_T)
        acc = zeros(BLOCK_T, BLOCK_N)
        for r0 in range(0, R, BLOCK_R):
            here = both(mine, r0 + r < R)
            at = t[:, None] * R + (r0 + r)[None, :]
            sums = zeros(BLOCK_T, BLOCK_R)
            for i in tl.static_range(PARTS):  # always in the same order
                sums += tl.load(part + i * M * R + at, mask=here & (r0 + r < rank)[None, :], other=0.0)
            ht = (sa * sums).to(h.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(h + at, ht, mask=here)
            at_b = b + tl.cast(a, tl.int64) * stride_ba + (r0 + r)[:, None].to(tl.int64) * stride_br
            near = ((r0 + r) // 8 * 8 < rank) & (r0 + r < R)  # by eights: loads as wide as they can be
            bt = tl.load(at_b + n[None, :].to(tl.int64) * stride_bn, mask=both(near, n < N), other=0.0)
            bt = tl.where((r0 + r < rank)[:, None], bt, 0.0)
            acc = tl.dot(ht, bt.to(ht.dtype), acc)
        at, inside = t[:, None].to(tl.int64) * N + n[None, :], both(mine, n < N)
        tl.store(lora + at, acc, mask=inside)
        if m is not None:
            tl.store(g + at, tl.broadcast_to(ga[None, :], (BLOCK_T, BLOCK_N)), mask=inside)


@kernel("x f b m c h lora g", "M R K x, M R N x")
def multi_low_kernel(
    x, f, s, b, m, c, ids, offsets, ranks, h, lora, g, M, G, K, N, R, stride_xm, stride_xk, stride_fa, stride_fk, stride_fr,
    stride_ba, stride_br, stride_bn,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """h = s_a x f_a, h b_a and g, of small ranks, token by token: all of h in each program, and some columns. What they share
    comes from the cache. One kernel, few registers and little shared memory: the pass over W begins when all of its programs
    have, and runs beside them. What it is handed stays in the cache meanwhile (h200/multi_cache.json): h B^T and g of 64 tokens
    and 14336 columns, 7.3 MB, were written to memory while W came."""
    if PDL:
        gdc_launch_dependents()
    t, r, k = tl.program_id(1), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    a = adapter_of(t, ids, offsets, M, G, BLOCK_G)
    rank = rank_of(ranks, a, G, R)
    inside = r < rank
    at_x = x + tl.cast(t, tl.int64) * stride_xm
    at_f = f + tl.cast(a, tl.int64) * stride_fa + r[:, None].to(tl.int64) * stride_fr
    sums = zeros(BLOCK_R)
    for k0 in tl.range(0, tl.where(rank > 0, K, 0), BLOCK_K, num_stages=STAGES):
        at = (k0 + k).to(tl.int64)
        xt = tl.load(at_x + at * stride_xk, mask=at < K, other=0.0)
        ft = tl.load(at_f + at[None, :] * stride_fk, mask=within(r, at, rank, K), other=0.0)
        sums += tl.sum(ft.to(xt.dtype).to(tl.float32) * xt.to(tl.float32)[None, :], axis=1)
    sa = vector(s, a, G)
    ht = tl.where(inside, sa * sums, 0.0).to(h.dtype.element_ty)
    if tl.program_id(0) == 0:
        put(ht, h + t * R, r, R)
    at_b = b + tl.cast(a, tl.int64) * stride_ba + r[None, :].to(tl.int64) * stride_br
    for n0 in tl.range(tl.program_id(0) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        near = (r < R)[None, :] & (n < tl.where(a < G, N, 0))[:, None]  # not r < rank: loads as narrow as one number
        bt = tl.load(at_b + n[:, None].to(tl.int64) * stride_bn, mask=near, other=0.0)
        bt = tl.where(inside[None, :], bt, 0.0).to(h.dtype.element_ty).to(tl.float32)
        acc = tl.sum(bt * ht.to(tl.float32)[None, :], axis=1)
        at = tl.cast(t, tl.int64) * N + n
        tl.store(lora + at, acc, mask=n < N, eviction_policy="evict_last")
        if m is not None:
            tl.store(g + at, g_of_adapter(m, c, a, n, G, N), mask=n < N, eviction_policy="evict_last")


@kernel("x w lora g out pre_scale", "M N K x")
def multi_small_kernel(
    x, w, lora, g, bias, out, pre_scale, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One pass over W for all tokens; the term of low rank and g are there by then."""
    t, n = tl.arange(0, BLOCK_M), block_on(0, BLOCK_N)
    x, w = Matrix(x, stride_xm, stride_xk), Matrix(w, stride_wk, stride_wn)
    acc = zeros(BLOCK_M, BLOCK_N)
    acc = products(acc, x, w, 0, tl.program_id(0) * BLOCK_N, M, N, K, BLOCK_K)
    if PDL:
        gdc_wait()
    acc += loaded(Matrix(lora, N, None), t, n, M, N)
    if pre_scale is not None:
        store(acc, Matrix(pre_scale, N, None), t, n, M, N)
    if g is not None:
        acc = acc * loaded(Matrix(g, N, None), t, n, M, N)
    if bias is not None:
        acc += vector(bias, n, N).to(tl.float32)[None, :]
    store(acc, Matrix(out, N, None), t, n, M, N)
