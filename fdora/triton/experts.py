"""What stands around the products of experts, a pass each; formulas: fdora/eager/experts.py. Roof: the bytes, at copy speed.

The products themselves are those of multi.py, with a W of three axes.
"""

from __future__ import annotations

import torch

from fdora.triton.kernels.experts import combine_kernel, gated_bwd_kernel, gated_fwd_kernel, gates_kernel
from fdora.triton.kernels.multi_rows import rows_kernel
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, named

COPIES = {"BLOCK_M": 8, "BLOCK_T": 8, "BLOCK_N": 512}
GATED = {"BLOCK_M": 8, "BLOCK_F": 256, "BLOCK_N": 256}  # of the activation


@planned(
    "experts_spread(Tensor x, Tensor order, Tensor? gates, SymInt k) -> Tensor",
    "rows to their experts",
    "tokens vector flat",
    lambda x, order, *_: {"rows": ((order.shape[0], x.shape[1]), x.dtype)},
    "one pass",
)
def plan_spread(plan: Builder, x: Array, order: Array, gates: Array | None, k: int) -> None:
    """x (T, N), order (T k,), gates (T, k) -> (T k, N)"""
    (out,) = plan.wanted()
    given = {"x": x, "order": order, "gates": gates, "out": out, "k": k, "SCATTER": False}
    plan.launch(rows_kernel, "M N", given | named("M N", out.shape), COPIES)


@planned(
    "experts_combine(Tensor rows, Tensor place, Tensor? gates) -> Tensor",
    "rows back from their experts",
    "tokens flat flat",
    lambda rows, place, _: {"y": ((place.shape[0], rows.shape[1]), rows.dtype)},
    "one pass",
)
def plan_combine(plan: Builder, rows: Array, place: Array, gates: Array | None) -> None:
    """rows (T k, N), place (T, k), gates (T, k) -> (T, N)"""
    (out,) = plan.wanted()
    given = {"rows": rows, "place": place, "gates": gates, "out": out, "k": plan.inputs[1].shape[1]}
    plan.launch(combine_kernel, "T N", given | named("T N", out.shape), COPIES)


@planned(
    "experts_gates(Tensor dy, Tensor rows, Tensor place, ScalarType dtype) -> Tensor",
    "gradient of the gates",
    "tokens tokens flat",
    lambda dy, rows, place, dtype: {"dgates": (place.shape, dtype)},
    "one pass",
)
def plan_gates(plan: Builder, dy: Array, rows: Array, place: Array, dtype: torch.dtype) -> None:
    """dy (T, N), rows (T k, N), place (T, k) -> (T, k)"""
    (out,) = plan.wanted()
    given = {"dy": dy, "rows": rows, "place": place, "out": out, "M": place.numel, "N": dy.shape[1], "k": out.shape[1]}
    plan.launch(gates_kernel, "M", given, COPIES)


@planned(
    "experts_act(Tensor z, str act) -> Tensor",
    "activation of experts",
    "flat",
    lambda z, _: {"a": ((z.shape[0], z.shape[1] // 2), z.dtype)},
    "one pass",
)
def plan_gated(plan: Builder, z: Array, act: str) -> None:
    """(M, 2 F) -> (M, F)"""
    (a,) = plan.wanted()
    plan.launch(gated_fwd_kernel, "M F", {"z": z, "a": a, "ACT": act, **named("M F", a.shape)}, GATED)


@planned(
    "experts_act_backward(Tensor da, Tensor z, str act) -> Tensor",
    "activation of experts backward",
    "flat flat",
    lambda da, z, _: {"dz": (z.shape, z.dtype)},
    "one pass",
    asks=(1, 0),
)
def plan_gated_bwd(plan: Builder, da: Array, z: Array, act: str) -> None:
    """(M, F), (M, 2 F) -> (M, 2 F)"""
    (dz,) = plan.wanted()
    plan.launch(gated_bwd_kernel, "M F", {"da": da, "z": z, "dz": dz, "ACT": act, **named("M F", plan.inputs[0].shape)}, GATED)


spread, combine, gates_bwd = plan_spread.call, plan_combine.call, plan_gates.call
gated_fwd, gated_bwd = plan_gated.call, plan_gated_bwd.call
