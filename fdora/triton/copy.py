"""Copies that a plan needs: another dtype, another layout, several matrices as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdora.triton.kernels.copy import by_g_kernel, copy_kernel
from fdora.triton.runtime import Array, Builder, cdiv, named
from fdora.triton.runtime.device import MOST_ROWS
from fdora.triton.runtime.layout import is_operand

BLOCK_M, BLOCK_N = 16, 256
MAX_AT_ONCE = 4  # as the kernel has arguments for


def in_dtype(plan: Builder, t: Array, dtype: torch.dtype) -> Array:
    """t itself, or a copy of the same layout."""
    if t.dtype == dtype:
        return t
    if t in plan.cast_with:
        if (t, dtype) not in plan.casts:
            out, at = stacked(plan, plan.cast_with[t], dtype), 0
            for each in plan.cast_with[t]:
                plan.casts[each, dtype] = out.rows(at, at + each.shape[0])
                at += each.shape[0]
        return plan.casts[t, dtype]
    by_columns = t.stride[0] == 1 and t.stride[1] != 1
    return stacked(plan, [t.T], dtype).T if by_columns else stacked(plan, [t], dtype)


def cast_together(plan: Builder, layers: Sequence[Any]) -> None:
    """From here on the first A, or B, that is wanted in another dtype brings those of the other layers along: one launch, which
    takes longer to start than to copy a factor."""
    adapted = [la for la in layers if la.A is not None]
    for parts in ([la.A for la in adapted], [la.B for la in adapted]):
        alike = [t for t in parts if t.stride[1] == 1 and t.shape[1] == parts[0].shape[1]]
        if len(set(alike)) == len(alike) > 1:
            plan.cast_with |= dict.fromkeys(alike, alike)


def operand(plan: Builder, W: Array) -> Array:
    """As cuBLAS takes it."""
    return W if is_operand(W.shape, W.stride) else stacked(plan, [W], W.dtype)


def dense(plan: Builder, t: Array) -> Array:
    """t with no gaps between its rows: itself, or a copy."""
    M, N = t.shape
    return t if t.stride == (N, 1) or M <= 1 else stacked(plan, [t], t.dtype, 1)


def stacked(plan: Builder, parts: Sequence[Array], dtype: torch.dtype, unit: int = 16) -> Array:
    """(R1, K), (R2, K), ... -> (R1 + R2 + ..., K), row by row, each at a multiple of ``unit`` bytes."""
    rows, columns = sum(t.shape[0] for t in parts), parts[0].shape[1]
    pitch = cdiv(columns * dtype.itemsize, unit) * unit // dtype.itemsize
    out = plan.temp((rows, columns), dtype, (pitch, 1))
    _copy(plan, parts, out)
    return out


def gradient(plan: Builder, out: Array, a: Array, b: Array) -> None:
    """(M, K) (K, N) -> ``out`` (M, N), row by row in any dtype: one that products do not write is rounded to after the sum."""
    if out.dtype in (a.dtype, torch.float32):
        plan.product(out, a, b)
        return
    wide = plan.temp(out.shape)
    plan.product(wide, a, b)
    _copy(plan, [wide], out)


def copied(plan: Builder, t: Array, out: Array) -> None:
    """t into ``out``, of the same shape."""
    _copy(plan, [t], out)


def _copy(plan: Builder, parts: Sequence[Array], out: Array) -> None:
    """Below each other, into the rows of ``out``."""
    for at, some in _batches(parts):
        given = {"out": out.rows(at, at + sum(t.shape[0] for t in some)), "columns": out.shape[1], "COUNT": len(some)}
        for i, t in enumerate([*some, *[None] * (MAX_AT_ONCE - len(some))]):
            sizes = (0, 0, 0) if t is None else (t.shape[0], *t.stride)
            given |= named(f"src{i} rows{i} stride_m{i} stride_n{i}", (t, *sizes))
        grid = (cdiv(out.shape[1], BLOCK_N), sum(cdiv(t.shape[0], BLOCK_M) for t in some))
        plan.launch(copy_kernel, grid, given | {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N})


def _batches(parts: Sequence[Array]) -> list[tuple[int, list[Array]]]:
    """What each launch copies, behind its first row of the result. Only a million rows are too many for one."""
    most = MOST_ROWS * BLOCK_M
    batches: list[tuple[int, list[Array]]] = []
    at = room = 0
    for t in (part.rows(i, i + most) for part in parts for i in range(0, max(1, part.shape[0]), most)):
        blocks = cdiv(t.shape[0], BLOCK_M)
        if not batches or blocks > room or len(batches[-1][1]) == MAX_AT_ONCE:
            batches.append((at, []))
            room = MOST_ROWS
        batches[-1][1].append(t)
        at, room = at + t.shape[0], room - blocks
    return batches


def by_g(plan: Builder, t: Array, m: Array, c: Array, out: Array) -> None:
    """g t into ``out``, rounded once: rows of adjacent columns, any dtype. ``out`` may be t."""
    block_k = min(256, max(16, 1 << (t.shape[1] - 1).bit_length()))
    given = {"t": t, "out": out, "m": m, "c": c, **named("N K stride_n stride_k", (*t.shape, *t.stride))}
    plan.launch(by_g_kernel, "N K", given | {"BLOCK_N": 4096 // block_k, "BLOCK_K": block_k})
