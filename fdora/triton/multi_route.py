"""Which tokens are whose, from the adapter of each: one launch that counts, where torch sorts in several.

The place of a token is how many come before it: those of earlier adapters, and earlier ones of its own. M^2 comparisons, so for
some thousand tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdora.triton.kernels.multi_route import multi_route_kernel
from fdora.triton.op import planned
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Like, Plan

BLOCK_T, BLOCK_S = 32, 128


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
    )
    plan.path = "the place of a token is counted"
    return plan.plan()


# ids (M,) -> offsets (G,) int32, order (M,) int64 and its inverse; tokens of no adapter come last
multi_route, route = planned(
    "multi_route",
    "(Tensor ids, SymInt adapters) -> Tensor[]",
    plan_route,
    lambda ids, adapters: [((adapters,), torch.int32), *[(ids.shape, torch.int64)] * 2],
)
