"""A gated activation: ``a = f(gate) up``, computed in acc_dtype and rounded once.

    silu        f(z) = z S(z)          f'(z) = S + f (1 - S)              S(z) = 1 / (1 + e^-z)
    gelu        f(z) = z P(z)          f'(z) = P + z p(z)                 P and p: distribution and density of the normal law
    gelu_tanh   f(z) = z S(2 u)        f'(z) = S + f (1 - S) 2 u'         u = sqrt(2 / pi) (z + 0.044715 z^3)

S(2 u) is (1 + tanh u) / 2. Backward:   d gate = da up f'(gate)     d up = da f(gate)
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fdora.eager._matmul import acc_dtype, cast

Act = Literal["silu", "gelu", "gelu_tanh"]
ACTS = ("silu", "gelu", "gelu_tanh")


def act_fwd(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """(M, N), (M, N) -> (M, N) in their dtype."""
    acc = acc_dtype(gate.dtype)
    return cast(_f(gate.to(acc), act) * up.to(acc), gate.dtype)


def act_bwd(da: Tensor, gate: Tensor, up: Tensor, act: Act) -> tuple[Tensor, Tensor]:
    """d gate, d up. A kernel may write the second into ``da``."""
    t, acc = gate.dtype, acc_dtype(gate.dtype)
    dgate = cast(_slope_times(da.to(acc) * up.to(acc), gate.to(acc), act), t)
    return dgate, cast(da.to(acc) * _f(gate.to(acc), act), t)


def _f(z: Tensor, act: Act) -> Tensor:
    return F.silu(z) if act == "silu" else F.gelu(z, approximate=_form(act))


def _slope_times(d: Tensor, z: Tensor, act: Act) -> Tensor:
    """d f'(z), in one pass: the temporaries of the formula are each as large as what is kept."""
    if act == "silu":
        return torch.ops.aten.silu_backward(d, z)
    return torch.ops.aten.gelu_backward(d, z, approximate=_form(act))


def _form(act: Act) -> str:
    return "tanh" if act == "gelu_tanh" else "none"
