"""What stands around the products of experts, a pass each; formulas: fdora/eager/experts.py. Roof: the bytes, at copy speed.

The products themselves are those of multi.py, with a W of three axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._torch import needs_dispatcher
from fdora.triton.kernels.experts import combine_kernel, gated_bwd_kernel, gated_fwd_kernel, gates_kernel, spread_kernel
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Like, Plan
from fdora.triton.runtime.walk import plan_for, run

BLOCK_M, BLOCK_N = 8, 512
TILE_M, TILE_N = 8, 256  # of the activation


def spread(x: Tensor, order: Tensor, gates: Tensor | None, k: int) -> Tensor:
    """x (T, N), order (T k,), gates (T, k) -> (T k, N)."""
    out: Tensor = (experts_spread if needs_dispatcher(x) else _spread)(x, order, gates, k)
    return out


def combine(rows: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    """rows (T k, N), place (T, k), gates (T, k) -> (T, N)."""
    out: Tensor = (experts_combine if needs_dispatcher(rows) else _combine)(rows, place, gates)
    return out


def gates_bwd(dy: Tensor, rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, N), rows (T k, N), place (T, k) -> (T, k)."""
    out: Tensor = (experts_gates if needs_dispatcher(dy) else _gates)(dy, rows, place, dtype)
    return out


def gated_fwd(z: Tensor, act: str) -> Tensor:
    """(M, 2 F) -> (M, F)."""
    out: Tensor = (experts_act if needs_dispatcher(z) else _gated)(z, act)
    return out


def gated_bwd(da: Tensor, z: Tensor, act: str) -> Tensor:
    """(M, F), (M, 2 F) -> (M, 2 F)."""
    out: Tensor = (experts_act_backward if needs_dispatcher(z) or needs_dispatcher(da) else _gated_bwd)(da, z, act)
    return out


def plan_spread(likes: Sequence[Like | None], device: Device, k: int) -> Plan:
    plan = Builder("rows to their experts", device)
    x, order, gates = plan.tokens(likes[0]), plan.vector(likes[1]), plan.flat(likes[2])
    (M,), N = order.shape, x.shape[1]
    out = plan.result("rows", (M, N), x.dtype)
    plan.launch(
        spread_kernel,
        (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)),
        {
            "x": x,
            "order": order,
            "gates": gates,
            "out": out,
            "M": M,
            "N": N,
            "k": k,
            "HAS_GATES": gates is not None,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
        },
        4,
    )
    plan.path = "one pass"
    return plan.plan()


def plan_combine(likes: Sequence[Like | None], device: Device, k: int) -> Plan:
    plan = Builder("rows back from their experts", device)
    rows, place, gates = plan.tokens(likes[0]), plan.flat(likes[1]), plan.flat(likes[2])
    T, N = place.shape[0] // max(1, k), rows.shape[1]
    out = plan.result("y", (T, N), rows.dtype)
    plan.launch(
        combine_kernel,
        (cdiv(T, BLOCK_M), cdiv(N, BLOCK_N)),
        {
            "rows": rows,
            "place": place,
            "gates": gates,
            "out": out,
            "T": T,
            "N": N,
            "k": k,
            "HAS_GATES": gates is not None,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
        },
        4,
    )
    plan.path = "one pass"
    return plan.plan()


def plan_gates(likes: Sequence[Like | None], device: Device, k: int, dtype: torch.dtype) -> Plan:
    plan = Builder("gradient of the gates", device)
    dy, rows, place = plan.tokens(likes[0]), plan.tokens(likes[1]), plan.flat(likes[2])
    (M,), N = place.shape, dy.shape[1]
    out = plan.result("dgates", (M // max(1, k), k), dtype)
    plan.launch(
        gates_kernel,
        (cdiv(M, BLOCK_M),),
        {"dy": dy, "rows": rows, "place": place, "out": out, "M": M, "N": N, "k": k, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N},
        4,
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
        4,
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
        4,
    )
    plan.path = "one pass"
    return plan.plan()


# each as an op that torch sees


def _planned_spread(x: Tensor, order: Tensor, gates: Tensor | None, k: int) -> tuple[Plan, tuple, tuple]:
    return plan_for(plan_spread, (x, order, gates), k), (x, order, gates), ()


def _planned_combine(rows: Tensor, place: Tensor, gates: Tensor | None) -> tuple[Plan, tuple, tuple]:
    return plan_for(plan_combine, (rows, place, gates), place.shape[1]), (rows, place, gates), ()


def _planned_gates(dy: Tensor, rows: Tensor, place: Tensor, dtype: torch.dtype) -> tuple[Plan, tuple, tuple]:
    return plan_for(plan_gates, (dy, rows, place), place.shape[1], dtype), (dy, rows, place), ()


def _planned_gated(z: Tensor, act: str) -> tuple[Plan, tuple, tuple]:
    return plan_for(plan_gated, (z,), act), (z,), ()


def _planned_gated_bwd(da: Tensor, z: Tensor, act: str) -> tuple[Plan, tuple, tuple]:
    return plan_for(plan_gated_bwd, (da, z), act), (da, z), ()


def _spread(x: Tensor, order: Tensor, gates: Tensor | None, k: int) -> Tensor:
    return run(*_planned_spread(x, order, gates, k))[0]


def _combine(rows: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    return run(*_planned_combine(rows, place, gates))[0]


def _gates(dy: Tensor, rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    return run(*_planned_gates(dy, rows, place, dtype))[0]


def _gated(z: Tensor, act: str) -> Tensor:
    return run(*_planned_gated(z, act))[0]


def _gated_bwd(da: Tensor, z: Tensor, act: str) -> Tensor:
    return run(*_planned_gated_bwd(da, z, act))[0]


def _fake_spread(x: Any, order: Any, gates: Any, k: int) -> Any:
    return x.new_empty((order.shape[0], x.shape[1]))


def _fake_combine(rows: Any, place: Any, gates: Any) -> Any:
    return rows.new_empty((place.shape[0], rows.shape[1]))


def _fake_gates(dy: Any, rows: Any, place: Any, dtype: Any) -> Any:
    return dy.new_empty(place.shape, dtype=dtype)


def _fake_gated(z: Any, act: str) -> Any:
    return z.new_empty((z.shape[0], z.shape[1] // 2))


def _fake_gated_bwd(da: Any, z: Any, act: str) -> Any:
    return z.new_empty(z.shape)


experts_spread = op(
    "experts_spread", _spread, _fake_spread, _planned_spread, "(Tensor x, Tensor order, Tensor? gates, SymInt k) -> Tensor"
)
experts_combine = op("experts_combine", _combine, _fake_combine, _planned_combine)
experts_gates = op("experts_gates", _gates, _fake_gates, _planned_gates)
experts_act = op("experts_act", _gated, _fake_gated, _planned_gated)
experts_act_backward = op("experts_act_backward", _gated_bwd, _fake_gated_bwd, _planned_gated_bwd)
