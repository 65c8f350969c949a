"""Autograd of a gated MLP, ``y = down(f(gate(x)) up(x))``: what backward can form again is not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora.autograd._ops import OPS, apply, autocast_off, autocast_on, no_graph, no_second_derivative, only, spread
from fdora.autograd.group import TENSORS, Layer, flat_of, layers_bwd, layers_fwd, layers_of, of_layers, to_inputs
from fdora.eager.act import ACTS as ACTS


def mlp(x: Tensor, gate: Layer, up: Layer, down: Layer, *options: Any) -> Tensor:
    """y; the options of Mlp.forward."""
    return apply(Mlp, x, *options, *gate, *up, *down)[0]


def mlp_bwd(
    ops: Any, dy: Tensor, x: Tensor, h: Tensor, h_down: Tensor, ys: tuple[Tensor | None, ...],
    inners: tuple[Tensor | None, ...], layers: list[Layer], act: str, p: float, mode: str, need_x: bool,
    needs: list[tuple[bool, ...]],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, then dA, dB, dm, dc, dbias (in acc_dtype) of gate, up and down."""

    def bwd(dys, x, part, h, need_x):
        kept = [y if inner is None else inner for y, inner in zip(ys[part], inners[part], strict=True)]
        kept_inner = [inner is not None for inner in inners[part]]
        return layers_bwd(ops.linear, dys, x, layers[part], h, kept, kept_inner, p, mode, need_x, needs[part])

    gate, up = (
        ops.linear.output(inner, la.m, la.c, la.bias) if y is None else y
        for y, inner, la in zip(ys[:2], inners[:2], layers[:2], strict=True)
    )
    need_a = need_x or any(map(any, needs[:2]))
    da, *of_down = bwd([dy], ops.act.act_fwd(gate, up, act), slice(2, 3), h_down, need_a)
    if not need_a:
        return None, *[None] * 10, *of_down
    pair = list(ops.act.act_bwd(da, gate, up, act))
    del da, gate, up
    return *bwd(pair, x, slice(0, 2), h, need_x), *of_down


class Mlp(torch.autograd.Function):
    """Keeps x, h of gate and up, h of down, one tensor each for gate and up, and for the m of down its output or inner.

    The tensor of gate and up is their output, which the activation's backward needs anyway and dm reads too; or, where the
    output will not do for dm, inner, from which the output follows. Only under "peft" dropout both are kept.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, act, p, mode, backend, *flat):
        ops, layers = OPS[backend], layers_of(flat)
        with autocast_off(x):
            pair, h, inners = layers_fwd(ops.linear, x, layers[:2], p, mode)
            (y,), h_down, (inner_down,) = layers_fwd(ops.linear, ops.act.act_fwd(*pair, act), layers[2:], p, mode)
        if mode != "peft":
            pair = [x.new_empty(0) if inner.dim() == 2 else v for v, inner in zip(pair, inners, strict=True)]
        return y, h, h_down, *pair, *inners, inner_down

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        x, ctx.act, ctx.p, ctx.mode, ctx.backend, *flat = inputs
        layers = layers_of(flat)
        ctx.plain = [(la.s, la.keep) for la in layers]
        y, h, h_down, *kept = output
        ctx.mark_non_differentiable(h, h_down, *kept)
        ctx.set_materialize_grads(False)
        gate, up, *inners = (None if t.dim() == 1 else t for t in kept)
        y = y if inners[2] is None and layers[2].keep != "nothing" else None
        ctx.save_for_backward(x, h, h_down, gate, up, y, *inners, *(t for la in layers for t in tuple(la)[:TENSORS]))

    @staticmethod
    def backward(ctx: Any, dy, *_):
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors  # once: checkpoint forms them again when they are asked for
        saved, flat = tensors[:9], tensors[9:]
        layers = [Layer(*flat[TENSORS * i : TENSORS * (i + 1)], *ctx.plain[i]) for i in range(3)]
        need_x, needs = ctx.needs_input_grad[0], of_layers(ctx.needs_input_grad[5:])
        if no_graph() and not autocast_on(dy):
            x, h, h_down, *kept = saved
            args = (dy, x, h, h_down, kept[:3], kept[3:], layers, ctx.act, ctx.p, ctx.mode, need_x, needs)
            dx, *grads = mlp_bwd(OPS[ctx.backend], *args)
        else:
            args = (ctx.act, ctx.p, ctx.mode, ctx.backend, need_x, needs, dy, *saved, *flat_of(layers))
            dx, *grads = spread(apply(MlpBwd, *args), (need_x, *(need for each in needs for need in each)))
        #      x   act   p     mode  backend
        return dx, None, None, None, None, *to_inputs(grads)


class MlpBwd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(act, p, mode, backend, need_x, needs, dy, x, h, h_down, *rest):
        args = (dy, x, h, h_down, rest[:3], rest[3:6], layers_of(rest[6:]), act, p, mode, need_x, needs)
        with autocast_off(x):
            return only(mlp_bwd(OPS[backend], *args))

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        pass

    @staticmethod
    def backward(ctx: Any, *_):
        raise no_second_derivative("dora_mlp")
