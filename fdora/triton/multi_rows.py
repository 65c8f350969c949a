"""Copies for many adapters: tokens into sorted order and back, the dropped x, a bank as one matrix of one dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fdora.triton.dropout import threshold
from fdora.triton.kernels.multi_rows import bank_kernel, multi_drop_kernel, rows_kernel
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array

BLOCK_M, BLOCK_N = 8, 512
BLOCK_P, BLOCK_Q = 16, 256


def sort(plan: Builder, t: Any, order: Array | None) -> Any:
    """Row by row in sorted order; itself where it is sorted already."""
    if order is None or t is None:
        return t
    out = plan.temp(t.shape, t.dtype)
    _rows(plan, t, order, out, False)
    return out


def unsort(plan: Builder, t: Array, order: Array, out: Array) -> None:
    """From sorted order into ``out``."""
    _rows(plan, t, order, out, True)


def _rows(plan: Builder, x: Array, order: Array, out: Array, scatter: bool) -> None:
    M, N = x.shape
    grid = (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))
    plan.launch(rows_kernel, grid, (x, order, out, M, N, x.stride[0]), (scatter, BLOCK_M, BLOCK_N), 4)


def drop(plan: Builder, x: Array, bank: Any, ids: Array, p: float) -> Array:
    """The dropped x, each token counted from the start of its segment, under the seed of its adapter; x itself without a seed."""
    if bank.seed is None:
        return x
    M, K = x.shape
    out = plan.temp(x.shape, x.dtype)
    plan.launch(
        multi_drop_kernel, (cdiv(M, BLOCK_M), cdiv(K, BLOCK_N)),
        (x, out, bank.seed, bank.offsets, ids, threshold(p), 1 / (1 - p), M, bank.A.shape[0], K, *x.stride), (BLOCK_M, BLOCK_N), 4,
    )  # fmt: skip
    return out


def as_matrix(plan: Builder, bank: Array, dtype: torch.dtype, unit: int = 1) -> tuple[Array, int]:
    """(G, P, Q) as (G * height, Q) as TMA takes it, and the height of each: P, or filled up with zeros to a multiple of
    ``unit``. Itself, or a copy."""
    G, P, Q = bank.shape
    by_bank, by_row, by_column = bank.stride
    height = cdiv(P, unit) * unit
    pitched = by_column == 1 and by_row >= Q and by_row * bank.itemsize % 16 == 0 and (by_bank == P * by_row or G == 1)
    if bank.dtype == dtype and bank.aligned and height == P and pitched:
        return replace(bank, shape=(G * P, Q), stride=(by_row, 1)), P
    pitch = cdiv(Q, 16 // dtype.itemsize) * (16 // dtype.itemsize)
    out = plan.temp((G * height, Q), dtype, (pitch, 1))
    plan.launch(
        bank_kernel, (cdiv(Q, BLOCK_Q), cdiv(height, BLOCK_P), G), (bank, out, P, Q, height, pitch, *bank.stride),
        (BLOCK_P, BLOCK_Q), 4,
    )  # fmt: skip
    return out, height
