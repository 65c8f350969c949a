"""What stands around the products of experts, a pass each; formulas: fdora/eager/experts.py. Roof: the bytes, at copy speed.

The products themselves are those of multi.py, with a W of three axes.
"""

from __future__ import annotations

import torch

from fdora.triton.kernels.experts import combine_kernel, gated_bwd_kernel, gated_fwd_kernel, gates_kernel
from fdora.triton.kernels.multi_rows import rows_kernel
from fdora.triton.op import maker, planned
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.plan import Array

COPIES = {"BLOCK_M": 8, "BLOCK_T": 8, "BLOCK_N": 512}
GATED = {"BLOCK_M": 8, "BLOCK_F": 256, "BLOCK_N": 256}  # of the activation


@maker("rows to their experts", "tokens vector flat", "one pass")
def plan_spread(plan: Builder, x: Array, order: Array, gates: Array | None, k: int) -> None:
    out = plan.result("rows", (order.numel, x.shape[1]), x.dtype)
    given = {"x": x, "order": order, "gates": gates, "out": out, "k": k, "SCATTER": False}
    plan.launch(rows_kernel, "M N", given | named("M N", out.shape), COPIES)


@maker("rows back from their experts", "tokens flat flat", "one pass")
def plan_combine(plan: Builder, rows: Array, place: Array, gates: Array | None) -> None:
    T, k = plan.inputs[1].shape
    out = plan.result("y", (T, rows.shape[1]), rows.dtype)
    given = {"rows": rows, "place": place, "gates": gates, "out": out, "k": k}
    plan.launch(combine_kernel, "T N", given | named("T N", out.shape), COPIES)


@maker("gradient of the gates", "tokens tokens flat", "one pass")
def plan_gates(plan: Builder, dy: Array, rows: Array, place: Array, dtype: torch.dtype) -> None:
    T, k = plan.inputs[2].shape
    out = plan.result("dgates", (T, k), dtype)
    given = {"dy": dy, "rows": rows, "place": place, "out": out, "M": place.numel, "N": dy.shape[1], "k": k}
    plan.launch(gates_kernel, "M", given, COPIES)


@maker("activation of experts", "flat", "one pass")
def plan_gated(plan: Builder, z: Array, act: str) -> None:
    M, width = plan.inputs[0].shape
    a = plan.result("a", (M, width // 2), z.dtype)
    plan.launch(gated_fwd_kernel, "M F", {"z": z, "a": a, "ACT": act, **named("M F", a.shape)}, GATED)


@maker("activation of experts backward", "flat flat", "one pass")
def plan_gated_bwd(plan: Builder, da: Array, z: Array, act: str) -> None:
    M, width = plan.inputs[1].shape
    dz = plan.result("dz", (M, width), z.dtype)
    plan.launch(gated_bwd_kernel, "M F", {"da": da, "z": z, "dz": dz, "M": M, "F": width // 2, "ACT": act}, GATED)


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
