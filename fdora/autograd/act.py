"""Autograd of a gated activation that stands by itself, of two tensors or of the halves of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._torch import apply
from fdora.autograd._ops import OPS, autocast_off, gradients_of


def gated_act(*args: Any) -> Tensor:
    """(..., F), (..., F) -> (..., F) in their dtype; the arguments of GatedAct.forward."""
    return apply(GatedAct, *args)


class GatedAct(torch.autograd.Function):
    """``f(gate) up``. Keeps both; torch's operators keep f(gate) as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, act: str, backend: str) -> Tensor:
        with autocast_off(gate):
            return OPS[backend].act_fwd(gate, up, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *pair, ctx.act, ctx.backend = inputs
        ctx.save_for_backward(*pair)

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> Any:
        compute = OPS[ctx.backend].act_bwd
        return *gradients_of("gated_act", (True, True), compute, da, *ctx.saved_tensors, ctx.act), None, None


def gated(z: Tensor, act: str) -> Tensor:
    return apply(Gated, z, act)


class Gated(torch.autograd.Function):
    """z (M, 2 F) -> (M, F). Saves z. For plain torch, whose backward is differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, act: str) -> Tensor:
        return OPS["eager"].gated_fwd(z, act)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.act = inputs[1]

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return OPS["eager"].gated_bwd(da, z, ctx.act), None
