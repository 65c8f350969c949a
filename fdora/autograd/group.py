"""Autograd of linear layers that read the same x: one node, one product for their h, one dx that each adds to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora.autograd._ops import OPS, apply, autocast_off, autocast_on, no_graph, no_second_derivative, only, spread


class Layer(NamedTuple):
    """One of the layers, as a Function takes it: its tensors, then what is no tensor. No A: no adapter."""

    W: Tensor
    A: Tensor | None
    B: Tensor | None
    m: Tensor | None
    c: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    s: float
    keep: str


SIZE, TENSORS = len(Layer._fields), 7


def layers_of(flat: Any) -> list[Layer]:
    return [Layer(*flat[i : i + SIZE]) for i in range(0, len(flat), SIZE)]


def flat_of(layers: list[Layer]) -> list[Any]:
    return [value for la in layers for value in la]


def group(x: Tensor, layers: list[Layer], *options: Any) -> tuple[Tensor, ...]:
    """One y for each layer; the options of Group.forward."""
    return apply(Group, x, *options, *flat_of(layers))[: len(layers)]


def layers_fwd(ops: Any, x: Tensor, layers: list[Layer], p: float, mode: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Each y; h of all, side by side; each inner, or an empty vector (a Function has no other way to say None to vmap)."""
    As, s = [la.A for la in layers if la.A is not None], [la.s for la in layers if la.A is not None]
    shared = ops.down(x, As, s) if len(As) > 1 and not p else None
    given = iter([None] * len(As) if shared is None else shared.split([A.shape[0] for A in As], 1))
    ys, hs, inners = [], [], []
    for la in layers:
        if la.A is None:
            y, inner = ops.frozen_fwd(x, la.W, la.bias), []
        else:
            y, h, *inner = ops.linear_fwd(x, *tuple(la)[:TENSORS], la.s, p, mode, la.keep, next(given))
            hs.append(h)
        ys.append(y)
        inners.append(inner[0] if inner else x.new_empty(0))
    if shared is None:
        shared = hs[0] if len(hs) == 1 else torch.cat(hs, 1) if hs else x.new_empty((x.shape[0], 0))
    return ys, shared, inners


def layers_bwd(
    ops: Any, dys: list[Tensor | None], x: Tensor, layers: list[Layer], h: Tensor, kept: list[Tensor | None],
    kept_inner: list[bool], p: float, mode: str, need_x: bool, needs: list[tuple[bool, ...]],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, then dA, dB, dm, dc, dbias (in acc_dtype) of each layer. ``dys`` is emptied, so that each can go when it was used."""
    hs = iter(h.split([la.A.shape[0] for la in layers if la.A is not None], 1))
    dx: Tensor | None = None
    grads: list[Tensor | None] = []
    for i, la in enumerate(layers):
        dy, hi = dys[i], None if la.A is None else next(hs)
        dys[i] = None
        if dy is None:  # nobody asked for this y
            grads += [None] * 5
        elif la.A is None:
            dx, dbias = ops.frozen_bwd(dy, la.W, (need_x, needs[i][-1]), dx)
            grads += [None, None, None, None, dbias]
        else:
            args = (dy, x, *tuple(la)[:5], hi, kept[i], la.seed, la.s, p, mode, kept_inner[i], (need_x, *needs[i]))
            dx, *rest = ops.linear_bwd(*args, dx)
            grads += rest
    return dx, *grads


def of_layers(flags: Any) -> list[tuple[bool, ...]]:
    """From needs_input_grad, for each layer: A, B, m, c, bias."""
    return [tuple(flags[i + 1 : i + 6]) for i in range(0, len(flags), SIZE)]


def to_inputs(grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of layers_bwd, dx left out, in the places of the inputs they belong to; autograd casts dbias."""
    out: list[Tensor | None] = []
    for i in range(0, len(grads), 5):
        #       W     A B m c bias        seed  s     keep
        out += [None, *grads[i : i + 5], None, None, None]
    return out


class Group(torch.autograd.Function):
    """Keeps x, h and, for the gradient of each m, the output itself or inner; the layers are the caller's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, p, mode, backend, *flat):
        with autocast_off(x):
            ys, h, inners = layers_fwd(OPS[backend].linear, x, layers_of(flat), p, mode)
        return *ys, h, *inners

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        x, ctx.p, ctx.mode, ctx.backend, *flat = inputs
        layers = layers_of(flat)
        n = len(layers)
        ys, h, inners = output[:n], output[n], output[n + 1 :]
        ctx.mark_non_differentiable(h, *inners)
        ctx.set_materialize_grads(False)
        ctx.kept_inner = [inner.dim() == 2 for inner in inners]
        ctx.plain = [(la.s, la.keep) for la in layers]
        kept = [
            inner if has else y if la.keep != "nothing" else None
            for y, inner, has, la in zip(ys, inners, ctx.kept_inner, layers, strict=True)
        ]
        ctx.save_for_backward(x, h, *kept, *(t for la in layers for t in tuple(la)[:TENSORS]))

    @staticmethod
    def backward(ctx: Any, *dys):
        n = len(ctx.plain)
        x, h, *rest = ctx.saved_tensors
        kept, flat = rest[:n], rest[n:]
        layers = [Layer(*flat[TENSORS * i : TENSORS * (i + 1)], *ctx.plain[i]) for i in range(n)]
        need_x = ctx.needs_input_grad[0] and any(dy is not None for dy in dys[:n])
        asked = of_layers(ctx.needs_input_grad[4:])
        needs = [(False,) * 5 if dy is None else each for dy, each in zip(dys[:n], asked, strict=True)]
        if no_graph() and not autocast_on(x):
            args = (list(dys[:n]), x, layers, h, kept, ctx.kept_inner, ctx.p, ctx.mode, need_x, needs)
            dx, *grads = layers_bwd(OPS[ctx.backend].linear, *args)
        else:
            flags = (need_x, *(need for each in needs for need in each))
            args = (ctx.p, ctx.mode, ctx.backend, ctx.kept_inner, need_x, needs, x, h, *dys[:n], *kept, *flat_of(layers))
            dx, *grads = spread(apply(GroupBwd, *args), flags)
        #      x   p     mode  backend
        return dx, None, None, None, *to_inputs(grads)


class GroupBwd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(p, mode, backend, kept_inner, need_x, needs, x, h, *rest):
        n = len(needs)
        dys, kept, layers = list(rest[:n]), list(rest[n : 2 * n]), layers_of(rest[2 * n :])
        with autocast_off(x):
            return only(layers_bwd(OPS[backend].linear, dys, x, layers, h, kept, kept_inner, p, mode, need_x, needs))

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        pass

    @staticmethod
    def backward(ctx: Any, *_):
        raise no_second_derivative("dora_linear_group")
