"""Autograd of compose and delta."""

from __future__ import annotations

from typing import Any

import torch

from fdora._torch import apply
from fdora.autograd._ops import OPS, gradients_of
from fdora.eager.linear import as_matrix as as_matrix


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
        *halves, _, ctx.s, ctx.delta, ctx.backend = inputs
        ctx.save_for_backward(*halves)

    @staticmethod
    def backward(ctx: Any, dy):
        needs = tuple(ctx.needs_input_grad[:4])
        rest = *ctx.saved_tensors, ctx.s, ctx.delta, needs
        compute = OPS[ctx.backend].compose_bwd
        grads = gradients_of("dora_compose and dora_delta", needs, compute, dy, *rest)  # autograd casts that of bias
        #      base lora g bias  s     delta backend
        return *grads, None, None, None
