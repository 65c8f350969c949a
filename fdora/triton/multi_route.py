"""Which tokens are whose, from the adapter of each: one launch that counts, where torch sorts in several.

The place of a token is how many come before it: those of earlier adapters, and earlier ones of its own. M^2 comparisons, so for
some thousand tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._torch import needs_dispatcher
from fdora.triton.kernels.multi_route import multi_route_kernel
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Like, Plan
from fdora.triton.runtime.walk import plan_for, run

BLOCK_T, BLOCK_S = 32, 128


def route(ids: Tensor, adapters: int) -> tuple[Tensor, Tensor, Tensor]:
    """(M,) -> offsets (G,) int32, order (M,) int64 and its inverse. Tokens of no adapter come last."""
    run_it: Any = multi_route if needs_dispatcher(ids) else _route
    offsets, order, place = run_it(ids, adapters)
    return offsets, order, place


def _route(ids: Tensor, adapters: int) -> tuple[Tensor, ...]:
    return run(*_planned(ids, adapters))


def _planned(ids: Tensor, adapters: int) -> tuple[Plan, tuple, tuple]:
    return plan_for(plan_route, (ids,), adapters), (ids,), ()


def plan_route(likes: Sequence[Like | None], device: Device, G: int) -> Plan:
    plan = Builder("tokens sorted by adapter", device)
    ids = plan.vector(likes[0])
    (M,) = ids.shape
    offsets = plan.result("offsets", (G,), torch.int32)
    order, place = plan.result("order", (M,), torch.int64), plan.result("place", (M,), torch.int64)
    parts = cdiv(M, BLOCK_T)
    plan.launch(
        multi_route_kernel,
        (parts + cdiv(G, BLOCK_T),),
        {
            "ids": ids,
            "offsets": offsets,
            "order": order,
            "place": place,
            "M": M,
            "G": G,
            "parts": parts,
            "BLOCK_T": BLOCK_T,
            "BLOCK_S": BLOCK_S,
        },
        4,
    )
    plan.path = "the place of a token is counted"
    return plan.plan()


def _fake_route(ids, adapters):
    order = ids.new_empty(ids.shape[0], dtype=torch.int64)
    return [ids.new_empty(adapters, dtype=torch.int32), order, torch.empty_like(order)]


multi_route = op("multi_route", _route, _fake_route, _planned, "(Tensor ids, SymInt adapters) -> Tensor[]")
