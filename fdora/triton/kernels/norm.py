"""The row norm of W + s B A, tile by tile; see fdora/triton/norm.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.hash import unchanged
from fdora.triton.kernels.tile import slab_of_A, slab_of_B, tile_of, unscaled
from fdora.triton.runtime.cost import launched
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def _norm_tile(
    i, W, A, B, scale_n, scale_k, partial, s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr,
):
    _, tile_k, n, k, w, acc = tile_of(
        i, W, A, B, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
        BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA,
    )
    if SCALED and TMA:  # a half of the columns at a time: the scales of 256 would spill
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
        w_low, w_high = tl.split(tl.permute(tl.reshape(w, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K // 2)
        v = w_low + s * unscaled(low, scale_n, scale_k, n, k, N, K)
        squares = tl.sum(v * v, axis=1)
        v = w_high + s * unscaled(high, scale_n, scale_k, n, k + BLOCK_K // 2, N, K)
        squares += tl.sum(v * v, axis=1)
    else:
        v = w + s * (unscaled(acc, scale_n, scale_k, n, k, N, K) if SCALED else acc)
        squares = tl.sum(v * v, axis=1)
    tl.store(partial + tile_k.to(tl.int64) * N + n, squares, mask=n < N)


@triton.jit
def _norm_strip(
    i, W, A, B, scale_n, scale_k, partial, s, N, K, R, span, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """BLOCK_N rows and ``span`` columns, B read once. With AHEAD given, W is copied ahead too, though it enters no product."""
    strips = tl.cdiv(K, span)
    strip = i % strips
    n, kk = i // strips * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    b = slab_of_B(B, n, N, R, stride_bn, stride_br, BLOCK_R, EVEN == 2)
    at_w = W + n[:, None].to(tl.int64) * stride_wn
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for k0 in tl.range(strip * span, min(K, strip * span + span), BLOCK_K, num_stages=AHEAD):
        k = k0 + kk
        at = at_w + k[None, :].to(tl.int64) * stride_wk
        w = tl.load(at) if EVEN else tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(b, slab_of_A(A, k, K, R, stride_ar, stride_ak, BLOCK_R, EVEN == 2))
        v = w.to(tl.float32) + s * (unscaled(acc, scale_n, scale_k, n, k, N, K) if SCALED else acc)
        squares += tl.sum(v * v, axis=1)
    tl.store(partial + strip.to(tl.int64) * N + n, squares, mask=n < N)


@triton.jit(launch_metadata=launched)
def norm_kernel(
    W, A, B, scale_n, scale_k, partial, old_hash, new_hash, s, N, K, R, span,
    stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if GUARDED or TMA:
        tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K if span is None else span)
        if GUARDED:
            tiles = tl.where(unchanged(old_hash, new_hash, WORDS), 0, tiles)
        # Flattened, the copies of the next tile start under the last products and the squares of this one.
        for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=TMA):
            if span is not None:
                _norm_strip(
                    i, W, A, B, scale_n, scale_k, partial, s, N, K, R, span,
                    stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
                    BLOCK_N, BLOCK_K, BLOCK_R, EVEN, SCALED, AHEAD,
                )
            else:
                _norm_tile(
                    i, W, A, B, scale_n, scale_k, partial, s, N, K, R,
                    stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
                    BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
                )
    elif span is not None:
        _norm_strip(
            tl.program_id(0), W, A, B, scale_n, scale_k, partial, s, N, K, R, span,
            stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
            BLOCK_N, BLOCK_K, BLOCK_R, EVEN, SCALED, AHEAD,
        )
    else:
        _norm_tile(
            tl.program_id(0), W, A, B, scale_n, scale_k, partial, s, N, K, R,
            stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
            BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
        )


@triton.jit(launch_metadata=launched)
def choose_kernel(
    partial, c, old_hash, new_hash, out, N, strips,
    KEEP: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):
    """The root of the column sums, added as in sum_kernel; or c as it was. KEEP writes it over c, too."""
    if PDL:
        gdc_wait()
    same = unchanged(old_hash, new_hash, WORDS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for t0 in range(0, 0 if same else strips, BLOCK_T):
        mask = (t0 + t < strips)[:, None] & (n < N)[None, :]
        acc += tl.sum(tl.load(partial + (t0 + t)[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0), axis=0)
    before = tl.load(c + n, mask=n < N, other=0.0)
    after = tl.where(same, before, tl.sqrt_rn(acc))
    tl.store(out + n, after, mask=n < N)
    if KEEP:
        tl.store(c + n, after, mask=n < N)
