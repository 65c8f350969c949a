"""Autograd of the whole layer."""

from __future__ import annotations

from typing import Any

import torch

from fdora.autograd._ops import OPS, apply, autocast_off, autocast_on, no_graph, no_second_derivative, only, spread


def linear(*args: Any) -> torch.Tensor:
    """y; the arguments of Linear.forward."""
    return Linear.forward(*args)[0] if no_graph() else apply(Linear, *args)[0]


class Linear(torch.autograd.Function):
    """Keeps x, h and, for the gradient of m, the output itself or inner; W, A, B, m, c are the caller's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, W, A, B, m, c, bias, seed, s, p, mode, keep, backend):
        fwd = OPS[backend].linear.linear_fwd
        if not autocast_on(x):
            return fwd(x, W, A, B, m, c, bias, seed, s, p, mode, keep)
        with autocast_off(x):
            return fwd(x, W, A, B, m, c, bias, seed, s, p, mode, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        x, W, A, B, m, c, bias, seed, ctx.s, ctx.p, ctx.mode, keep, ctx.backend = inputs
        y, h, *inner = output
        ctx.kept_inner = len(inner) > 0
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(h, *inner)
        ctx.set_materialize_grads(False)  # else torch fills zeros for h and inner on every backward
        kept = None if keep == "nothing" else inner[0] if inner else y
        ctx.save_for_backward(x, W, A, B, m, c, h, kept, seed)

    @staticmethod
    def backward(ctx: Any, dy, *_):
        if dy is None:
            return (None,) * 13
        need_x, _, need_A, need_B, need_m, need_c, need_bias = ctx.needs_input_grad[:7]
        needs = (need_x, need_A, need_B, need_m, need_c, need_bias)
        args = (dy, *ctx.saved_tensors, ctx.s, ctx.p, ctx.mode, ctx.kept_inner, needs)
        if no_graph() and not autocast_on(dy):
            dx, dA, dB, dm, dc, dbias = OPS[ctx.backend].linear.linear_bwd(*args)
        else:
            dx, dA, dB, dm, dc, dbias = spread(apply(LinearBwd, *args, ctx.backend), needs)
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        #      x   W     A   B   m   c   bias   seed  s     p     mode  keep  backend
        return dx, None, dA, dB, dm, dc, dbias, None, None, None, None, None, None


class LinearBwd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(dy, x, W, A, B, m, c, h, kept, seed, s, p, mode, kept_inner, needs, backend):
        with autocast_off(x):
            bwd = OPS[backend].linear.linear_bwd
            return only(bwd(dy, x, W, A, B, m, c, h, kept, seed, s, p, mode, kept_inner, needs))

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        pass

    @staticmethod
    def backward(ctx: Any, *_):
        raise no_second_derivative("dora_linear")
