"""A gated activation in one pass, ``a = f(gate) up``: two reads and one write; backward three reads and two writes.

Formulas: :mod:`fdora.eager.act`. Roof: the bytes, at copy speed.
"""

from __future__ import annotations

from fdora.triton.kernels.act import act_bwd_kernel, act_fwd_kernel
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array

BLOCK = 2048


def forward(plan: Builder, gate: Array, up: Array, a: Array, act: str) -> None:
    """All contiguous, of one shape."""
    plan.launch(
        act_fwd_kernel, (cdiv(a.numel, BLOCK),), {"gate": gate, "up": up, "a": a, "count": a.numel, "ACT": act, "BLOCK": BLOCK}
    )


def backward(plan: Builder, da: Array, gate: Array, up: Array, dgate: Array, dup: Array, act: str) -> None:
    """d gate, d up; ``dup`` may be ``da``."""
    plan.launch(
        act_bwd_kernel,
        (cdiv(da.numel, BLOCK),),
        {"da": da, "gate": gate, "up": up, "dgate": dgate, "dup": dup, "count": da.numel, "ACT": act, "BLOCK": BLOCK},
    )
