"""Fold an adapter into its weight, ``W' = g (W + s B A)``, and take it out again: one read and one write of W, no dense B A.

A program owns one tile: products on tensor cores with a float32 sum, then g, then one rounding. Roof: the larger of two
passes over W and the products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fdora.triton._launch import capability, cdiv, fits_tma, launch, multiprocessors, traced
from fdora.triton._op import op
from fdora.triton._split import rows_at_a_time, split_A, split_B
from fdora.triton._tile import GROUP, tile_at, unscaled, weight_and_product, weight_and_product_tma
from fdora.triton.configs import merge_config

EPS = tl.constexpr(1e-12)  # the floor of c in g = m / c, as in fdora/eager/norm.py


@triton.jit
def _merge_tile(
    i, W, A, B, scale_n, scale_k, m, c, out, s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    UNDO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    tile_n, tile_k = tile_at(i, N, K, BLOCK_N, BLOCK_K, GROUP)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    if TMA:
        w, acc = weight_and_product_tma(W, A, B, tile_n * BLOCK_N, tile_k * BLOCK_K, R, BLOCK_N, BLOCK_K, BLOCK_R)
    else:
        w, acc = weight_and_product(
            W, A, B, n, k, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION
        )
    if SCALED:
        acc = unscaled(acc, scale_n, scale_k, n, k, N, K)
    cn = tl.load(c + n, mask=n < N, other=1.0).to(tl.float32)
    # A comparison with NaN is false: the row keeps it.
    g = tl.div_rn(tl.load(m + n, mask=n < N, other=1.0).to(tl.float32), tl.where(cn < EPS, EPS, cn))[:, None]
    if UNDO:  # a row with c = 0 was -s B A itself
        w = tl.where((cn <= EPS)[:, None], 0.0, w / g)
    v = w - s * acc if UNDO else g * (w + s * acc)
    if TMA:
        out.store([tile_n * BLOCK_N, tile_k * BLOCK_K], v.to(out.dtype))
    else:
        at = out + n[:, None].to(tl.int64) * K + k[None, :]
        tl.store(at, v.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _merge_kernel(
    W, A, B, scale_n, scale_k, m, c, out, s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    UNDO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    if TMA:
        # Flattened, the copies of the next tile run under the last products and the stores of this one.
        for i in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K), tl.num_programs(0), flatten=True):
            _merge_tile(
                i, W, A, B, scale_n, scale_k, m, c, out, s, N, K, R,
                stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
                UNDO, BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
            )  # fmt: skip
    else:
        _merge_tile(
            tl.program_id(0), W, A, B, scale_n, scale_k, m, c, out, s, N, K, R,
            stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
            UNDO, BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
        )  # fmt: skip


def merge_fwd(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float) -> Tensor:
    """(N, K) -> (N, K) in the dtype of W, contiguous."""
    return (merge if traced(W) else _merge)(W, A, B, m, c, s, False)


def unmerge_fwd(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float) -> Tensor:
    """(N, K) merged -> (N, K). A row with c = 0 was -s B A itself; one with g = 0 and c > 0 comes back as NaN."""
    return (merge if traced(W) else _merge)(W, A, B, m, c, s, True)


def _merge(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float, undo: bool) -> Tensor:
    (N, K), R = W.shape, A.shape[0]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = A.float(), B.float()
    out, m, c = torch.empty((N, K), device=W.device, dtype=W.dtype), m.contiguous(), c.contiguous()
    rows = 0 if A.element_size() == 2 else rows_at_a_time(N, K, R, None, 0)
    split = rows > 0
    with torch.cuda.device_of(W):
        a, by_k = split_A(A) if split else (A, None)
        for i in range(0, N, rows or max(1, N)):
            part = slice(i, i + (rows or N))
            b, by_n = split_B(B[part]) if split else (B, None)
            _launch(W[part], a, b, by_n, by_k, m[part], c[part], out[part], s, undo)
    return out


def _launch(
    W: Tensor, A: Tensor, B: Tensor, by_n: Tensor | None, by_k: Tensor | None, m: Tensor, c: Tensor, out: Tensor,
    s: float, undo: bool,
) -> None:  # fmt: skip
    (N, K), R = W.shape, A.shape[0]
    aligned = W.element_size() == 2 and all(fits_tma(t) for t in (W, A, B, out))
    plain = by_n is None and not undo
    config = merge_config(R, A.element_size() == 2, capability(W.device), aligned, W.element_size() == 2, plain)
    block_n, block_k, block_r, precision, num_warps, num_stages, tma = config
    programs = cdiv(N, block_n) * cdiv(K, block_k)
    if programs:
        tensors: tuple = (W, A, B)
        strides: tuple = (*W.stride(), *A.stride(), *B.stride())
        result: Any = out
        if tma:
            programs = min(programs, multiprocessors(W.device))
            blocks = ((block_n, block_k), (block_r, block_k), (block_n, block_r))
            tensors = tuple(TensorDescriptor.from_tensor(t, list(b)) for t, b in zip(tensors, blocks, strict=True))
            result, strides = TensorDescriptor.from_tensor(out, [block_n, block_k]), (None,) * 6
        launch(
            _merge_kernel, (programs,), (*tensors, by_n, by_k, m, c, result, s, N, K, R, *strides),
            (undo, block_n, block_k, block_r, GROUP, N % block_n == 0 and K % block_k == 0 and R % block_r == 0, precision,
             tma, by_n is not None), num_warps, num_stages,
        )  # fmt: skip


def _fake_merge(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float, undo: bool) -> Any:
    return torch.empty(W.shape, device=W.device, dtype=W.dtype)


merge = op("merge", _merge, _fake_merge)
