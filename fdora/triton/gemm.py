"""One matrix product with the low-rank term and everything elementwise inside: nothing of size (M, N) but the result.

    out = epilogue( x W + mask( x0 W + h B ) )      x, x0 (M, K), W (K, N), h (M, r), B (r, N)
    epilogue(v) = v | g v + bias | v + (g - 1) add + bias | v + add          g = m / max(c, EPS), one value per column

Forward: W and B are the transposed weights, h = s x A^T. Backward: x is dz, W the weight as it is, h = s dz B, B is A.
The mask (dropout of the adapter's input) belongs to the low-rank term only, so that term is accumulated first and masked in
registers. The kernels accumulate in float32 and round once. In the last epilogue ``add`` is ``out`` itself: a program reads a
tile before it writes it, and no other program touches it.

On Hopper and data-centre Blackwell tiles travel by TMA. Both products then run in *one* loop of K / BLOCK_K + r / BLOCK_K
steps that picks its pair of descriptors by a select, and that loop is flattened into the loop over tiles: the copies of the
next tile start under the last products and the epilogue of this one. On an H100 that is as fast as cuBLAS alone on x W (see
bench/NOTES.md); two loops after each other lose 5 to 10 %. Elsewhere, and where strides rule TMA out, pointers are used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fdora.triton._launch import capability, cdiv, fits_tma, launch, multiprocessors
from fdora.triton._repeat import repeatable
from fdora.triton.configs import GemmConfig, gemm_config, power_of_two
from fdora.triton.dropout import keep_tile, threshold
from fdora.triton.scale import scale_tile

_config = lru_cache(4096)(gemm_config)


@triton.jit
def _tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile; GROUP rows of tiles run together, so that their slabs of W meet in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    within = pid % (GROUP * tiles_n)
    return (group * GROUP + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _masked(acc, row, col, seed, threshold, keep_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    keep = keep_tile(seed, threshold, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N))
    return tl.where(keep, acc * keep_scale, 0.0)


@triton.jit
def _bias_tile(bias, n, N, HAS_BIAS: tl.constexpr):
    return tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0


@triton.jit
def _store_tma(
    acc, out, inner, add, m, c, bias, row, col, N, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_INNER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    n = col + tl.arange(0, WIDTH)
    if STORE_INNER:
        inner.store([row, col], acc.to(inner.dtype))
    if EPILOGUE == "scale":
        acc = acc * scale_tile(m, c, n, N)[None, :] + _bias_tile(bias, n, N, HAS_BIAS)
    if EPILOGUE == "add":
        correction = (scale_tile(m, c, n, N) - 1)[None, :] * add.load([row, col]).to(tl.float32)
        acc = acc + correction + _bias_tile(bias, n, N, HAS_BIAS)
    if EPILOGUE == "onto":
        acc = acc + add.load([row, col]).to(tl.float32)
    out.store([row, col], acc.to(out.dtype))


@triton.jit
def _gemm_tma_kernel(
    x, x0, w, h, b, out, inner, add, m, c, bias, seed, threshold, keep_scale, M, N, K, R, PROGRAMS,
    W_ROWS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_INNER: tl.constexpr, DROP: tl.constexpr,
    HAS_X0: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HALVES: tl.constexpr,
    FLATTEN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    steps_k, steps_r = tl.cdiv(K, BLOCK_K), tl.cdiv(R, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        row, col = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if DROP:
            for i in range(steps_r):
                bt = b.load([col, i * BLOCK_K]).T if W_ROWS else b.load([i * BLOCK_K, col])
                acc = tl.dot(h.load([row, i * BLOCK_K]), bt, acc)
            if HAS_X0:
                for i in range(steps_k):
                    wt = w.load([col, i * BLOCK_K]).T if W_ROWS else w.load([i * BLOCK_K, col])
                    acc = tl.dot(x0.load([row, i * BLOCK_K]), wt, acc)
            acc = _masked(acc, row, col, seed, threshold, keep_scale, BLOCK_M, BLOCK_N)
            for i in range(steps_k):
                wt = w.load([col, i * BLOCK_K]).T if W_ROWS else w.load([i * BLOCK_K, col])
                acc = tl.dot(x.load([row, i * BLOCK_K]), wt, acc)
        else:
            for i in range(steps_k + steps_r):
                if i < steps_k:
                    left, right, at = x, w, i * BLOCK_K
                else:
                    left, right, at = h, b, (i - steps_k) * BLOCK_K
                wt = right.load([col, at]).T if W_ROWS else right.load([at, col])
                acc = tl.dot(left.load([row, at]), wt, acc)
        if HALVES:  # half the tile at a time through shared memory leaves room for one more stage
            WIDTH: tl.constexpr = BLOCK_N // 2
            one, two = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
            _store_tma(one, out, inner, add, m, c, bias, row, col, N, EPILOGUE, HAS_BIAS, STORE_INNER, WIDTH)
            _store_tma(two, out, inner, add, m, c, bias, row, col + WIDTH, N, EPILOGUE, HAS_BIAS, STORE_INNER, WIDTH)
        else:
            _store_tma(acc, out, inner, add, m, c, bias, row, col, N, EPILOGUE, HAS_BIAS, STORE_INNER, BLOCK_N)


@triton.jit
def _products(
    acc, x, w, row, col, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t, n, k = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at_x = x + t[:, None].to(tl.int64) * stride_xm + k[None, :].to(tl.int64) * stride_xk
    at_w = w + k[:, None].to(tl.int64) * stride_wk + n[None, :].to(tl.int64) * stride_wn
    for k0 in range(0, K, BLOCK_K):
        xt = tl.load(at_x, mask=(t < M)[:, None] & (k < K - k0)[None, :], other=0.0)
        wt = tl.load(at_w, mask=(k < K - k0)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(xt, wt, acc)
        at_x += BLOCK_K * stride_xk
        at_w += BLOCK_K * stride_wk
    return acc


@triton.jit
def _gemm_pointer_kernel(
    x, x0, w, h, b, out, inner, add, m, c, bias, seed, threshold, keep_scale, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_hm, stride_hr, stride_br, stride_bn,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_INNER: tl.constexpr, DROP: tl.constexpr, HAS_X0: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, col = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = _products(
        acc, h, b, row, col, M, N, R, stride_hm, stride_hr, stride_br, stride_bn, BLOCK_M, BLOCK_N, BLOCK_R
    )  # fmt: skip
    if HAS_X0:
        acc = _products(
            acc, x0, w, row, col, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    if DROP:
        acc = _masked(acc, row, col, seed, threshold, keep_scale, BLOCK_M, BLOCK_N)
    acc = _products(acc, x, w, row, col, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K)
    t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    at = t[:, None].to(tl.int64) * N + n[None, :]
    mask = (t < M)[:, None] & (n < N)[None, :]
    if STORE_INNER:
        tl.store(inner + at, acc.to(inner.dtype.element_ty), mask=mask)
    if EPILOGUE == "scale":
        acc = acc * scale_tile(m, c, n, N)[None, :] + _bias_tile(bias, n, N, HAS_BIAS)
    if EPILOGUE == "add":
        correction = (scale_tile(m, c, n, N) - 1)[None, :] * tl.load(add + at, mask=mask, other=0.0).to(tl.float32)
        acc = acc + correction + _bias_tile(bias, n, N, HAS_BIAS)
    if EPILOGUE == "onto":
        acc = acc + tl.load(add + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


class Epilogue(NamedTuple):
    """What happens to the accumulator: nothing, "scale", "add" or "onto"."""

    kind: str = "none"
    m: Tensor | None = None
    c: Tensor | None = None
    bias: Tensor | None = None
    add: Tensor | None = None


class Dropped(NamedTuple):
    """The mask on the low-rank term, and the operand x0 whose product is masked with it."""

    seed: Tensor | None = None
    p: float = 0.0
    x0: Tensor | None = None


PLAIN, KEPT = Epilogue(), Dropped()


def gemm(
    x: Tensor, w: Tensor, h: Tensor, b: Tensor, epilogue: Epilogue = PLAIN, drop: Dropped = KEPT,
    keep_inner: bool = False, config: GemmConfig | None = None, onto: Tensor | None = None, turned: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(M, K) (K, N) (M, r) (r, N), float16 or bfloat16, any strides -> out and inner (M, N) contiguous.

    ``turned``: w and b are (N, K) and (N, r).
    ``onto``: a contiguous (M, N) that the result is added to in place; it is ``out`` then, and the epilogue must be "none".
    ``config`` overrides the table, for the search that writes it.
    """
    return _gemm(x, w, h, b, *(epilogue if onto is None else Epilogue("onto", add=onto)), *drop, keep_inner, config, turned)


@repeatable
def _gemm(
    x: Tensor, w: Tensor, h: Tensor, b: Tensor, kind: str, m: Tensor | None, c: Tensor | None, bias: Tensor | None,
    add: Tensor | None, seed: Tensor | None, p: float, x0: Tensor | None, keep_inner: bool, config: GemmConfig | None,
    turned: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    w, b = (w.T, b.T) if turned else (w, b)
    (M, K), N, r = x.shape, w.shape[1], h.shape[1]
    out = torch.empty((M, N), device=x.device, dtype=x.dtype) if kind != "onto" else add
    assert out is not None
    inner = torch.empty_like(out) if keep_inner else None
    if out.numel() == 0:
        return out, inner
    w_rows = w.stride(0) == 1 and w.stride(1) != 1
    extra = keep_inner or add is not None
    config = config or _config(M, N, K, r, w_rows, extra, capability(x.device))
    vectors = (m, c, bias, seed, threshold(p), 1 / (1 - p), M, N, K, r)
    flags = (kind, bias is not None, keep_inner, seed is not None, x0 is not None)
    if config.tma and all(t is None or fits_tma(t) for t in (x, x0, out, w.T if w_rows else w)):
        _launch_tma(x, x0, w, h, b, out, inner, add, vectors, flags, w_rows, config)
    else:
        _launch_pointers(x, x0, w, h, b, out, inner, add, vectors, flags, config)
    return out, inner


def _launch_tma(
    x: Tensor, x0: Tensor | None, w: Tensor, h: Tensor, b: Tensor, out: Tensor, inner: Tensor | None, add: Tensor | None,
    vectors: tuple, flags: tuple, w_rows: bool, config: GemmConfig,
) -> None:  # fmt: skip
    bm, bn, bk = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    width = bn // 2 if config.halves else bn
    right = [bn, bk] if w_rows else [bk, bn]
    tiles = cdiv(out.shape[0], bm) * cdiv(out.shape[1], bn)
    programs = min(tiles, multiprocessors(x.device)) if config.persistent else tiles
    dropped = flags[3]
    launch(
        _gemm_tma_kernel, (programs,),
        (_tiles(x, [bm, bk]), _tiles(x0, [bm, bk]), _tiles(w.T if w_rows else w, right), _tiles(_fit(h), [bm, bk]),
         _tiles(_fit(b.T if w_rows else b), right), _tiles(out, [bm, width]), _tiles(inner, [bm, width]),
         _tiles(add, [bm, width]), *vectors, programs),
        (w_rows, *flags, bm, bn, bk, config.halves, config.persistent and not dropped, config.GROUP),
        config.num_warps, config.num_stages,
    )  # fmt: skip


def _launch_pointers(
    x: Tensor, x0: Tensor | None, w: Tensor, h: Tensor, b: Tensor, out: Tensor, inner: Tensor | None, add: Tensor | None,
    vectors: tuple, flags: tuple, config: GemmConfig,
) -> None:  # fmt: skip
    if x0 is not None and x0.stride() != x.stride():
        x, x0 = x.contiguous(), x0.contiguous()
    if config.tma:
        config = _config(*out.shape, x.shape[1], h.shape[1], False, False, 0)
    tiles = cdiv(out.shape[0], config.BLOCK_M) * cdiv(out.shape[1], config.BLOCK_N)
    launch(
        _gemm_pointer_kernel, (tiles,),
        (x, x0, w, h, b, out, inner, add, *vectors, *x.stride(), *w.stride(), *h.stride(), *b.stride()),
        (*flags, config.BLOCK_M, config.BLOCK_N, config.BLOCK_K,
         min(config.BLOCK_K, power_of_two(h.shape[1])), config.GROUP),
        config.num_warps, config.num_stages,
    )  # fmt: skip


def _fit(t: Tensor) -> Tensor:
    """A factor of the adapter as TMA takes it: itself, or a copy with padded rows (small beside W)."""
    if fits_tma(t):
        return t
    copy = t.new_empty((t.shape[0], -(-t.shape[1] // 8) * 8))[:, : t.shape[1]]
    return copy.copy_(t)


def _tiles(t: Tensor | None, block: list[int]) -> TensorDescriptor | None:
    return None if t is None else TensorDescriptor(t, list(t.shape), list(t.stride()), block)
