"""Autograd of a layer whose forward multiplies 8-bit numbers: the node of linear.py with another forward.

What rounds x to 8 bits counts as the identity. Backward runs in the dtype of x on W as its format decodes it; m alone gets the
exact derivative of what forward computed, whose output it reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fdora._records import WIDTH, Operands
from fdora._torch import apply, no_graph
from fdora.autograd._ops import OPS, autocast_off, autocast_on
from fdora.autograd.linear import Call, Linear, outputs
from fdora.autograd.weight import flat_of, specs_of


def fp8_linear(x: Tensor, layer: Operands, call: Call) -> Tensor:
    """y; W is a QuantWeight of e4m3."""
    if no_graph() and not autocast_on(x):
        return OPS[call.backend].fp8_fwd(x, [layer], call.options, call.drop)[0][0]
    specs = specs_of([layer])
    call = Call(call.options, call.drop, call.backend, specs)
    y: Tensor = apply(Fp8Linear, call, x, *flat_of([layer], specs))[0]
    return y


class Fp8Linear(Linear):
    @staticmethod
    def forward(call: Call, x: Tensor, *flat: Tensor | None) -> Any:
        assert call.specs is not None and call.specs[0] is not None
        layer = Operands(call.specs[0].weight(flat[WIDTH:]), *flat[1:WIDTH])
        with autocast_off(x):
            ys, saved = OPS[call.backend].fp8_fwd(x, [layer], call.options, call.drop)
        return outputs(x, ys, saved)
