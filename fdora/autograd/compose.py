"""Autograd of compose and delta."""

from __future__ import annotations

from typing import Any

import torch

from fdora._torch import apply
from fdora.autograd._ops import OPS, Derivative, drop_none, restore_none


def compose(*args: Any) -> torch.Tensor:
    """y or the delta; the arguments of Compose.forward."""
    return apply(Compose, *args)


class Compose(torch.autograd.Function):
    """Keeps base, lora and g."""

    generate_vmap_rule = True

    @staticmethod
    def forward(base, lora, g, bias, s, delta, backend):
        return OPS[backend].compose_fwd(base, lora, g, bias, s, delta)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        base, lora, g, bias, ctx.s, ctx.delta, ctx.backend = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(base, lora, g)

    @staticmethod
    def backward(ctx: Any, dy):
        needs = tuple(ctx.needs_input_grad[:4])
        grads = apply(ComposeBwd, "dora_compose and dora_delta", dy, *ctx.saved_tensors, ctx.s, ctx.delta, needs, ctx.backend)
        dbase, dlora, dg, dbias = restore_none(grads, needs)
        #      base   lora   g   bias                                              s     delta backend
        return dbase, dlora, dg, dbias if dbias is None else dbias.to(ctx.bias_dtype), None, None, None


class ComposeBwd(Derivative):
    @staticmethod
    def forward(fn, dy, base, lora, g, s, delta, needs, backend):
        return drop_none(OPS[backend].compose_bwd(dy, base, lora, g, s, delta, needs))
