"""A gated activation: ``a = f(gate) up``, computed in acc_dtype and rounded once.

    silu        f(z) = z S(z)                       f'(z) = S (1 + z (1 - S))                       S(z) = 1 / (1 + e^-z)
    gelu        f(z) = z P(z)                       f'(z) = P + z p(z)                              P, p of the normal law
    gelu_tanh   f(z) = z S(2 u),                    f'(z) = S + z S (1 - S) 2 u'                    u = k (z + 0.044715 z^3)

with k = sqrt(2 / pi), and S(2 u) = (1 + tanh u) / 2. Backward:   d gate = da up f'(gate)     d up = da f(gate)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fdora.eager._matmul import acc_dtype, cast

Act = Literal["silu", "gelu", "gelu_tanh"]
ACTS = ("silu", "gelu", "gelu_tanh")
CUBIC = 0.044715


def act_fwd(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """(M, N), (M, N) -> (M, N) in their dtype."""
    acc = acc_dtype(gate.dtype)
    z = gate.to(acc)
    return cast(z * _share(z, act) * up.to(acc), gate.dtype)


def act_bwd(da: Tensor, gate: Tensor, up: Tensor, act: Act) -> tuple[Tensor, Tensor]:
    """d gate, d up. A kernel may write the second into ``da``."""
    t, acc = gate.dtype, acc_dtype(gate.dtype)
    z, wide = gate.to(acc), da.to(acc)
    share = _share(z, act)
    if act == "silu":
        slope = share * (1 + z * (1 - share))
    elif act == "gelu":
        slope = share + z * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
    else:
        slope = share * (1 + z * (1 - share) * (2 * math.sqrt(2 / math.pi)) * (1 + 3 * CUBIC * z * z))
    return cast(wide * up.to(acc) * slope, t), cast(wide * z * share, t)


def _share(z: Tensor, act: Act) -> Tensor:
    """f(z) / z."""
    if act == "silu":
        return torch.sigmoid(z)
    if act == "gelu":
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + CUBIC * z * z * z))
