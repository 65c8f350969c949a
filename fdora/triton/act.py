"""A gated activation, ``a = f(gate) up``, as steps of an MLP's plan and as a plan of its own. Formulas: :mod:`fdora.eager.act`.

Forward is two reads and one write, backward three and two; torch's operators move five and nine. Roof: the bytes, at
copy speed.
"""

from __future__ import annotations

from typing import Any

from fdora.triton.copy import dense
from fdora.triton.kernels.act import act_bwd_kernel, act_fwd_kernel
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, cdiv

BLOCK = 2048  # elements that a program has


def act_forward(plan: Builder, gate: Array, up: Array, a: Array, act: str) -> None:
    """a = f(gate) up; all contiguous, of one shape."""
    _elementwise(plan, act_fwd_kernel, a.numel, {"gate": gate, "up": up, "a": a, "ACT": act})


def act_backward(plan: Builder, da: Array, gate: Array, up: Array, dgate: Array, dup: Array, act: str) -> None:
    """d gate, d up; ``dup`` may be ``da``."""
    _elementwise(plan, act_bwd_kernel, da.numel, {"da": da, "gate": gate, "up": up, "dgate": dgate, "dup": dup, "ACT": act})


def _elementwise(plan: Builder, kernel: Any, count: int, given: dict[str, Any]) -> None:
    plan.launch(kernel, (cdiv(count, BLOCK),), given | {"count": count, "BLOCK": BLOCK})


@planned(
    "gated_act(Tensor gate, Tensor up, str act) -> Tensor",
    "gated activation",
    "tokens tokens",
    lambda gate, *_: {"a": (gate.shape, gate.dtype)},
    "one pass",
    has_families=True,
)
def plan_act(plan: Builder, gate: Array, up: Array, act: str) -> None:
    (a,) = plan.wanted()
    act_forward(plan, dense(plan, gate), dense(plan, up), a, act)


@planned(
    "gated_act_backward(Tensor da, Tensor gate, Tensor up, str act) -> Tensor[]",
    "gated activation backward",
    "tokens tokens tokens",
    lambda _, gate, *__: dict.fromkeys(("dgate", "dup"), (gate.shape, gate.dtype)),
    "one pass",
    has_families=True,
)
def plan_act_backward(plan: Builder, da: Array, gate: Array, up: Array, act: str) -> None:
    dgate, dup = plan.wanted()
    act_backward(plan, dense(plan, da), dense(plan, gate), dense(plan, up), dgate, dup, act)


act_fwd, act_bwd = plan_act.call, plan_act_backward.call
