"""The row norm of W + s B A for a W of 8-bit codes; see kernels/quant.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import beside, byte_scales, byte_weights
from fdora.triton.kernels.quant import product_of, run_at, runs_of, store_w
from fdora.triton.kernels.tile import slab_of_B
from fdora.triton.runtime.cost import launched


@triton.jit
def _quant8_run(
    i, codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
    stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ONE_SLAB: tl.constexpr, SCALED: tl.constexpr,
):
    run, begin, end, first_n, n, row, in_n = run_at(i, first, N, K, BLOCK_N, BLOCK_K, RUN, GROUP)
    b = slab_of_B(B, n, N, R, stride_bn, stride_br, BLOCK_R, EVEN) if ONE_SLAB and not TMA else None
    squares = tl.zeros((BLOCK_N,), tl.float32)
    AHEAD: tl.constexpr = RUN > 1 and (MODE != "block" or BK % BLOCK_K == 0)
    if AHEAD:
        x, scale = _codes8(
            codes, scales, row, begin * BLOCK_K, in_n, K, groups, stride_cn, stride_ck, MODE, BN, BK, BLOCK_K, EVEN
        )
    for tile_k in range(begin, end):
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        next_k = (min(tile_k + 1, end - 1) if AHEAD else tile_k) * BLOCK_K
        x_next, scale_next = _codes8(
            codes, scales, row, next_k, in_n, K, groups, stride_cn, stride_ck, MODE, BN, BK, BLOCK_K, EVEN
        )
        if not AHEAD:
            x, scale = x_next, scale_next
        acc = product_of(
            A, B, b, n, k, first_n, tile_k * BLOCK_K, N, K, R, stride_ar, stride_ak, stride_bn, stride_br, scale_n, scale_k,
            BLOCK_R, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
        )
        inside = in_n[:, None] & (k < K)[None, :]
        w = byte_weights(beside(x, acc, PTX), scale, CODE, BY_BITS)
        if not EVEN:
            w = tl.where(inside, w, 0.0)
        v = w + s * acc
        squares += tl.sum(v * v, axis=1)
        if STORE:
            store_w(dense, w, row, k, inside, pitch, EVEN)
        if AHEAD:
            x, scale = x_next, scale_next
    tl.store(partial + run.to(tl.int64) * N + n, squares, mask=in_n)


@triton.jit
def _codes8(
    codes, scales, row, first_k, in_n, K, groups, stride_cn, stride_ck,
    MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):
    """Codes of a tile and their scales."""
    k = first_k + tl.arange(0, BLOCK_K)
    inside = in_n[:, None] & (k < K)[None, :]
    at = codes + row[:, None] * stride_cn + k[None, :].to(tl.int64) * stride_ck
    x = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    return x, byte_scales(scales, row, k, first_k, in_n, inside, groups, MODE, BN, BK, BLOCK_K)


@triton.jit(launch_metadata=launched)
def quant8_kernel(
    codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, old_hash, new_hash, s, first, N, K, R, groups,
    stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br,
    CODE: tl.constexpr, BY_BITS: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PTX: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ONE_SLAB: tl.constexpr, SCALED: tl.constexpr,
    GUARDED: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """N rows from ``first`` on, as above. e4m3 codes come as bytes: Triton has no float8 below sm_89 (BY_BITS)."""
    if GUARDED or TMA:  # flattened, the copies of the next tile start under the last products of this one
        runs = runs_of(old_hash, new_hash, N, K, BLOCK_N, BLOCK_K, RUN, GUARDED, WORDS, PDL)
        for i in tl.range(tl.program_id(0), runs, tl.num_programs(0), flatten=TMA):
            _quant8_run(
                i, codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
                stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br, CODE, BY_BITS, MODE, BN, BK, PTX, STORE,
                BLOCK_N, BLOCK_K, BLOCK_R, RUN, GROUP, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
            )
    else:
        _quant8_run(
            tl.program_id(0), codes, scales, A, B, scale_n, scale_k, partial, dense, pitch, s, first, N, K, R, groups,
            stride_cn, stride_ck, stride_ar, stride_ak, stride_bn, stride_br, CODE, BY_BITS, MODE, BN, BK, PTX, STORE,
            BLOCK_N, BLOCK_K, BLOCK_R, RUN, GROUP, EVEN, PRECISION, TMA, ONE_SLAB, SCALED,
        )
