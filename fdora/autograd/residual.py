"""Autograd of a layer with a residual: the node of linear.py, whose forward adds it and whose backward hands dy on to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fdora._records import Operands
from fdora._torch import apply, no_graph
from fdora.autograd._ops import OPS, autocast_off, autocast_on
from fdora.autograd.linear import Call, Linear, backward, outputs
from fdora.autograd.weight import flat_of, layers_of, readable, specs_of


def residual_linear(x: Tensor, layer: Operands, residual: Tensor, call: Call) -> Tensor:
    """y; the residual has its shape and dtype."""
    if no_graph() and not autocast_on(x):
        layers = readable([layer], x.dtype, call.backend)
        return OPS[call.backend].layers_fwd(x, layers, call.options, call.drop, residual)[0][0]
    specs = specs_of([layer])
    call = call if specs is None else Call(call.options, call.drop, call.backend, specs)
    y: Tensor = apply(ResidualLinear, call, x, *flat_of([layer], specs), residual)[0]
    return y


class ResidualLinear(Linear):
    """The residual comes last, and is not kept."""

    @staticmethod
    def forward(call: Call, x: Tensor, *flat: Tensor | None) -> Any:
        *operands, residual = flat
        with autocast_off(x):
            layers = layers_of(operands, call.specs, x.dtype, call.backend)
            ys, saved = OPS[call.backend].layers_fwd(x, layers, call.options, call.drop, residual)
        return outputs(x, ys, saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Linear.setup_context(ctx, inputs[:-1], output)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        if dys[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        return (*backward(ctx, *dys), dys[0] if ctx.needs_input_grad[-1] else None)
