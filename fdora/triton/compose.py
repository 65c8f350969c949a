"""Compose and delta in one pass: two reads and one write forward; three reads and two writes backward.

Backward also forms the sums over tokens: a program walks down ROWS rows of its columns and writes one partial per column;
:func:`fdora.triton._launch.column_sums` adds them in a fixed order. Roof: the bytes, at copy speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import cdiv, column_sums, launch, rows_of, traced
from fdora.triton._op import op

BLOCK_M, BLOCK_N = 4, 512
BWD_M, BWD_N, ROWS = 32, 128, 128


@triton.jit
def _compose_fwd_kernel(
    base, lora, g, bias, y, s, M, N, stride_base, stride_lora, stride_y,
    DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    row = m[:, None].to(tl.int64)
    u = tl.load(base + row * stride_base + n[None, :], mask=mask).to(tl.float32)
    v = s * tl.load(lora + row * stride_lora + n[None, :], mask=mask).to(tl.float32)
    gn = tl.load(g + n, mask=n < N)[None, :]
    out = (gn - 1) * u + gn * v if DELTA else gn * (u + v)
    if HAS_BIAS:
        out += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
    tl.store(y + row * stride_y + n[None, :], out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _compose_bwd_kernel(
    dy, base, lora, g, dbase, dlora, partial_g, partial_bias, s, M, N, stride_dy, stride_base, stride_lora,
    DELTA: tl.constexpr, NEED_BASE: tl.constexpr, NEED_LORA: tl.constexpr, NEED_G: tl.constexpr, NEED_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    gn = tl.load(g + n, mask=in_n, other=0.0)[None, :]
    sum_g = tl.zeros((BLOCK_N,), tl.float32)
    sum_bias = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(0, ROWS, BLOCK_M):
        m = tl.program_id(1) * ROWS + i + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & in_n[None, :]
        row = m[:, None].to(tl.int64)
        d = tl.load(dy + row * stride_dy + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_BASE:
            tl.store(dbase + row * N + n[None, :], (d * (gn - 1 if DELTA else gn)).to(dbase.dtype.element_ty), mask=mask)
        if NEED_LORA:
            tl.store(dlora + row * N + n[None, :], (d * (s * gn)).to(dlora.dtype.element_ty), mask=mask)
        if NEED_G:
            u = tl.load(base + row * stride_base + n[None, :], mask=mask, other=0.0).to(tl.float32)
            v = tl.load(lora + row * stride_lora + n[None, :], mask=mask, other=0.0).to(tl.float32)
            sum_g += tl.sum(d * (u + s * v), axis=0)
        if NEED_BIAS:
            sum_bias += tl.sum(d, axis=0)
    at = tl.program_id(1).to(tl.int64) * N + n
    if NEED_G:
        tl.store(partial_g + at, sum_g, mask=in_n)
    if NEED_BIAS:
        tl.store(partial_bias + at, sum_bias, mask=in_n)


def compose_fwd(base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, s: float, delta: bool) -> Tensor:
    """(M, N), (M, N), (N,), (N,) or None -> (M, N) in the dtype of base."""
    return (compose if traced(base) else _compose)(base, lora, g, bias, s, delta)


def compose_bwd(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """dbase, dlora, dg, dbias (the last in float32); each only when needed."""
    grads = iter((compose_backward if traced(dy) else _compose_backward)(dy, base, lora, g, s, delta, list(needs)))
    return tuple(next(grads) if need else None for need in needs)


def _compose(base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, s: float, delta: bool) -> Tensor:
    base, lora = rows_of(base), rows_of(lora)
    M, N = base.shape
    y = torch.empty((M, N), device=base.device, dtype=base.dtype)
    g, bias = g.contiguous(), None if bias is None else bias.contiguous()
    if M and N:
        with torch.cuda.device_of(base):
            launch(
                _compose_fwd_kernel, (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)),
                (base, lora, g, bias, y, s, M, N, base.stride(0), lora.stride(0), N),
                (delta, bias is not None, BLOCK_M, BLOCK_N), 4,
            )  # fmt: skip
    return y


def _fake_compose(base, lora, g, bias, s, delta):
    return torch.empty(base.shape, device=base.device, dtype=base.dtype)


def _compose_backward(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: list[bool]
) -> list[Tensor]:
    dy, base, lora, g = rows_of(dy), rows_of(base), rows_of(lora), g.contiguous()
    M, N = base.shape
    need_base, need_lora, need_g, need_bias = needs
    strips = cdiv(M, ROWS)

    def new(need: bool, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, device=base.device, dtype=dtype) if need else None

    dbase, dlora = new(need_base, (M, N), base.dtype), new(need_lora, (M, N), lora.dtype)
    sums = [new(need, (strips, N), torch.float32) for need in (need_g, need_bias)]
    with torch.cuda.device_of(base):
        if M and N:
            launch(
                _compose_bwd_kernel, (cdiv(N, BWD_N), strips),
                (dy, base, lora, g, dbase, dlora, *sums, s, M, N, dy.stride(0), base.stride(0), lora.stride(0)),
                (delta, need_base, need_lora, need_g, need_bias, BWD_M, BWD_N, ROWS), 4,
            )  # fmt: skip
        return [d for d in (dbase, dlora) if d is not None] + [column_sums(p) for p in sums if p is not None]


def _fake_compose_backward(dy, base, lora, g, s, delta, needs):
    shapes = ((base.shape, base.dtype), (base.shape, lora.dtype), (g.shape, torch.float32), (g.shape, torch.float32))
    return [torch.empty(sh, device=base.device, dtype=t) for (sh, t), need in zip(shapes, needs, strict=True) if need]


compose = op("compose", _compose, _fake_compose)
compose_backward = op("compose_backward", _compose_backward, _fake_compose_backward)
