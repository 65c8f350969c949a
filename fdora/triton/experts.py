"""What stands around the products of experts, a pass each; formulas: fdora/eager/experts.py. Roof: the bytes, at copy speed.

The products themselves are those of multi.py, with a W of three axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdora.triton.kernels.experts import combine_kernel, gated_bwd_kernel, gated_fwd_kernel, gates_kernel, spread_kernel
from fdora.triton.op import planned
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Like, Plan

BLOCK_M, BLOCK_N = 8, 512
TILE_M, TILE_N = 8, 256  # of the activation


def plan_spread(likes: Sequence[Like | None], device: Device, k: int) -> Plan:
    plan = Builder("rows to their experts", device)
    x, order, gates = plan.tokens(likes[0]), plan.vector(likes[1]), plan.flat(likes[2])
    (M,), N = order.shape, x.shape[1]
    out = plan.result("rows", (M, N), x.dtype)
    given = {"x": x, "order": order, "gates": gates, "out": out, "M": M, "N": N, "k": k}
    plan.launch(spread_kernel, (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)), {**given, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N})
    plan.path = "one pass"
    return plan.plan()


def plan_combine(likes: Sequence[Any], device: Device) -> Plan:
    plan = Builder("rows back from their experts", device)
    rows, place, gates = plan.tokens(likes[0]), plan.flat(likes[1]), plan.flat(likes[2])
    (T, k), N = likes[1].shape, rows.shape[1]
    out = plan.result("y", (T, N), rows.dtype)
    given = {"rows": rows, "place": place, "gates": gates, "out": out, "T": T, "N": N, "k": k}
    plan.launch(combine_kernel, (cdiv(T, BLOCK_M), cdiv(N, BLOCK_N)), {**given, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N})
    plan.path = "one pass"
    return plan.plan()


def plan_gates(likes: Sequence[Any], device: Device, dtype: torch.dtype) -> Plan:
    plan = Builder("gradient of the gates", device)
    dy, rows, place = plan.tokens(likes[0]), plan.tokens(likes[1]), plan.flat(likes[2])
    (M,), N, (T, k) = place.shape, dy.shape[1], likes[2].shape
    out = plan.result("dgates", (T, k), dtype)
    plan.launch(
        gates_kernel,
        (cdiv(M, BLOCK_M),),
        {"dy": dy, "rows": rows, "place": place, "out": out, "M": M, "N": N, "k": k, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N},
    )
    plan.path = "one pass"
    return plan.plan()


def plan_gated(likes: Sequence[Like | None], device: Device, act: str) -> Plan:
    plan = Builder("activation of experts", device)
    z = plan.flat(likes[0])
    assert likes[0] is not None
    M, F = likes[0].shape[0], likes[0].shape[1] // 2
    a = plan.result("a", (M, F), z.dtype)
    plan.launch(
        gated_fwd_kernel,
        (cdiv(M, TILE_M), cdiv(F, TILE_N)),
        {"z": z, "a": a, "M": M, "F": F, "ACT": act, "BLOCK_M": TILE_M, "BLOCK_N": TILE_N},
    )
    plan.path = "one pass"
    return plan.plan()


def plan_gated_bwd(likes: Sequence[Like | None], device: Device, act: str) -> Plan:
    plan = Builder("activation of experts backward", device)
    da, z = plan.flat(likes[0]), plan.flat(likes[1])
    assert likes[1] is not None
    M, F = likes[1].shape[0], likes[1].shape[1] // 2
    dz = plan.result("dz", (M, 2 * F), z.dtype)
    plan.launch(
        gated_bwd_kernel,
        (cdiv(M, TILE_M), cdiv(F, TILE_N)),
        {"da": da, "z": z, "dz": dz, "M": M, "F": F, "ACT": act, "BLOCK_M": TILE_M, "BLOCK_N": TILE_N},
    )
    plan.path = "one pass"
    return plan.plan()


# x (T, N), order (T k,), gates (T, k) -> (T k, N)
experts_spread, spread = planned(
    "experts_spread",
    "(Tensor x, Tensor order, Tensor? gates, SymInt k) -> Tensor",
    plan_spread,
    lambda x, order, *_: ((order.shape[0], x.shape[1]), x.dtype),
)
# rows (T k, N), place (T, k), gates (T, k) -> (T, N)
experts_combine, combine = planned(
    "experts_combine",
    "(Tensor rows, Tensor place, Tensor? gates) -> Tensor",
    plan_combine,
    lambda rows, place, _: ((place.shape[0], rows.shape[1]), rows.dtype),
)
# dy (T, N), rows (T k, N), place (T, k) -> (T, k)
experts_gates, gates_bwd = planned(
    "experts_gates",
    "(Tensor dy, Tensor rows, Tensor place, ScalarType dtype) -> Tensor",
    plan_gates,
    lambda dy, rows, place, dtype: (place.shape, dtype),
)
# (M, 2 F) -> (M, F)
experts_act, gated_fwd = planned(
    "experts_act", "(Tensor z, str act) -> Tensor", plan_gated, lambda z, _: ((z.shape[0], z.shape[1] // 2), z.dtype)
)
# (M, F), (M, 2 F) -> (M, 2 F)
experts_act_backward, gated_bwd = planned(
    "experts_act_backward",
    "(Tensor da, Tensor z, str act) -> Tensor",
    plan_gated_bwd,
    lambda da, z, _: (z.shape, z.dtype),
    asks=(1, 0),
)
