"""Fold an adapter into its weight, ``W' = g (W + s B A)``, and take it out again: one read and one write of W, no dense B A.

A program owns one tile: products on tensor cores with a float32 sum, then g, then one rounding. Roof: the larger of two
passes over W and the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora.triton.copy import in_dtype
from fdora.triton.kernels.merge import merge_kernel
from fdora.triton.norm import GROUP_N, tiled
from fdora.triton.op import planned
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar, Tile
from fdora.triton.split import rows_at_a_time, split_A, split_B
from fdora.triton.tiles.configs import merge_config


def merge_fwd(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float) -> Tensor:
    """(N, K) -> (N, K) in the dtype of W, contiguous."""
    merged: Tensor = _merge(W, A, B, m, c, s, False)
    return merged


def unmerge_fwd(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float) -> Tensor:
    """(N, K) merged -> (N, K). A row with c = 0 was -s B A itself; one with g = 0 and c > 0 comes back as NaN."""
    base: Tensor = _merge(W, A, B, m, c, s, True)
    return base


def plan_merge(likes: Sequence[Like | None], device: Device, undo: bool) -> Plan:
    plan = Builder("dora_unmerge" if undo else "dora_merge", device)
    W, A, B = map(plan.matrix, likes[:3])
    m, c, s = plan.vector(likes[3]), plan.vector(likes[4]), plan.scalar("s")
    (N, K), R = W.shape, A.shape[0]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = in_dtype(plan, A, torch.float32), in_dtype(plan, B, torch.float32)
    out = plan.result("W", (N, K), W.dtype)
    plan.path = "one read and one write of W, no dense B A"
    rows = 0 if A.itemsize == 2 else rows_at_a_time(N, K, R, None, 0)
    a, by_k = split_A(plan, A) if rows else (A, None)
    for i in range(0, N, rows or max(1, N)):
        j = i + (rows or N)
        b, by_n = split_B(plan, B.rows(i, j)) if rows else (B, None)
        _merge_rows(plan, W.rows(i, j), a, b, by_n, by_k, m.rows(i, j), c.rows(i, j), out.rows(i, j), s, undo)
    return plan.plan()


def _merge_rows(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    by_n: Array | None,
    by_k: Array | None,
    m: Array,
    c: Array,
    out: Array,
    s: Scalar,
    undo: bool,
) -> None:
    (N, K), R, half = W.shape, A.shape[0], W.itemsize == 2
    aligned = half and all(is_tma_compatible(t) for t in (W, A, B, out))
    config = merge_config(R, A.itemsize == 2, plan.device.capability, aligned, half, by_n is None and not undo)
    programs = cdiv(N, config.BLOCK_N) * cdiv(K, config.BLOCK_K)
    tensors, even = tiled(config, W, A, B)
    result: Any = out
    if config.TMA:
        programs, result = min(programs, plan.device.num_sms), Tile(out, config[:2])
    given = {"scale_n": by_n, "scale_k": by_k, "m": m, "c": c, "out": result, "s": s, "N": N, "K": K, "R": R}
    given |= {**named("W A B", tensors), "UNDO": undo, "GROUP": GROUP_N, "EVEN": even}
    plan.launch(merge_kernel, (programs,), given, config)


merge, _merge = planned(
    "merge",
    "(Tensor W, Tensor A, Tensor B, Tensor m, Tensor c, float s, bool undo) -> Tensor",
    plan_merge,
    lambda W, *_: (W.shape, W.dtype),
)
