"""Rows of an adapted table, ``y = g (W[ids] + s A^T[ids] B^T)``: a gather, a thin product on tensor cores and g in one pass.

A program owns some tokens and a span of columns. It gathers its columns of A once, then walks the span: the rows of W, the rows
of B that belong to the columns, one store. B comes out of L2 for every program, A in single elements where it is (r, V) as PEFT
has it, so a program takes many tokens and a wide span, as long as there are programs for every multiprocessor.

With a norm of each row that nobody gave, a program owns whole rows and walks them twice. Roof: a read and a write of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import Lookup
from fdora._torch import needs_dispatcher
from fdora.triton.configs import power_of_two
from fdora.triton.kernels.embedding import embedding_kernel
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Like, Plan
from fdora.triton.runtime.walk import plan_for, run

WHOLE = 64  # up to this rank a program keeps its columns of A


class Config(NamedTuple):
    BLOCK_T: int
    BLOCK_D: int
    BLOCK_R: int
    SPAN: int
    num_warps: int
    num_stages: int


def config_of(T: int, D: int, R: int, half: bool, num_sms: int) -> Config:
    """As wide a span as leaves enough programs to fill the GPU twice over: some three of them share a multiprocessor.

    Reasoned, not measured: `python -m bench.embedding --device cuda --tiles` times others. float32 is multiplied in registers.
    """
    if half:
        many = T >= 2048 and R <= WHOLE
        block_t, block_d, block_r = (64 if many else 16), 128, (power_of_two(R) if R <= WHOLE else 32)
    else:
        block_t, block_d, block_r = 16, 64, 16
    span = block_d
    while 2 * span <= 1024 and cdiv(T, block_t) * cdiv(D, 2 * span) >= 6 * num_sms:
        span *= 2
    return Config(block_t, block_d, block_r, span, 4, 3)


def embedding_fwd(ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, how: Lookup) -> Tensor:
    """ids (...) -> y (..., d) in the dtype of W. c of None: of each row that is read. No max_norm."""
    assert how.max_norm is None
    return (embedding if needs_dispatcher(W) else _embedding)(ids, W, A, B, m, c, how.s, how.per_row)


def _embedding(ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, s: float, per_row: bool) -> Tensor:
    return run(*_planned(ids, W, A, B, m, c, s, per_row))[0]


def _planned(
    ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, s: float, per_row: bool
) -> tuple[Plan, tuple, tuple]:
    tensors = (ids, W, A, B, m, c)
    return plan_for(plan_embedding, tensors, per_row), tensors, (s,)


def plan_embedding(likes: Sequence[Like | None], device: Device, per_row: bool) -> Plan:
    plan = Builder("dora_embedding", device)
    shape = likes[0].shape  # type: ignore[union-attr]
    ids, (W, A, B) = plan.flat(likes[0]), map(plan.matrix, likes[1:4])
    m, c, s = plan.vector(likes[4]), plan.vector(likes[5]), plan.scalar("s")
    (T,), (V, D), R = ids.shape, W.shape, A.shape[0]
    y = plan.result("y", (*shape, D), W.dtype)
    own_norm = per_row and c is None
    block_t, block_d, block_r, span, num_warps, num_stages = config_of(T, D, R, W.itemsize == 2, device.num_sms)
    span = max(D, 1) if own_norm else span
    plan.path = "gather, low-rank product and g in one pass" + (", after one for the norms of the rows" if own_norm else "")
    plan.launch(
        embedding_kernel, (cdiv(T, block_t), cdiv(D, span)),
        (ids, W, A, B, m, c, y, s, T, V, D, R, *W.stride, *A.stride, *B.stride),
        (per_row, own_norm, block_r >= R, block_t, block_d, block_r, span), num_warps, num_stages,
    )  # fmt: skip
    return plan.plan()


def _fake(ids: Any, W: Any, A: Any, B: Any, m: Any, c: Any, s: float, per_row: bool) -> Any:
    return torch.empty((*ids.shape, W.shape[1]), device=W.device, dtype=W.dtype)


embedding = op("embedding", _embedding, _fake, _planned)
