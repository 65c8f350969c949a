"""Autograd of a gated MLP, ``y = down(f(gate(x)) up(x))``: one node, which saves what SavedMlp says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import BoundMlp, Dropout, Grads, Needs, Operands, Options, SavedMlp
from fdora._torch import apply, eager_apply, no_graph, values_only
from fdora.autograd._ops import OPS, autocast_off, autocast_on, drop_none, no_second_derivative, reread, restore_none
from fdora.autograd.linear import needs_of, to_inputs
from fdora.autograd.weight import Specs, flat_of, layers_of, readable, specs_of, without_norm
from fdora.eager.act import ACTS as ACTS

PARTS = len(SavedMlp._fields)


class Call(NamedTuple):
    """What is no tensor in a call."""

    options: tuple[Options, ...]
    drop: Dropout
    act: str
    backend: str
    specs: Specs = None
    """Of quantised weights; :func:`mlp` fills it in."""
    run: BoundMlp | None = None
    """For :func:`eager_mlp`, which :func:`bound` fills in."""
    seen: tuple[Tensor, ...] = ()
    keep: bool = True
    """As in linear.py."""


def mlp(x: Tensor, layers: Sequence[Operands], call: Call) -> Tensor:
    """y; gate, up and down in this order."""
    if no_graph() and not autocast_on(x):
        return forward(x, readable(layers, x.dtype, call.backend), call)[0]
    specs = specs_of(layers)
    call = call if specs is None else Call(call.options, call.drop, call.act, call.backend, specs)
    return apply(Mlp, call, x, *flat_of(layers, specs))[0]


def bound(tensors: tuple[Tensor | None, ...], call: Call) -> Call:
    """As for linear.py: x, and the operands of gate, up and down."""
    run = OPS[call.backend].mlp_bound(tensors, call.options, call.drop, call.act)
    return Call(call.options, call.drop, call.act, call.backend, None, run)


def eager_mlp(tensors: tuple[Any, ...], call: Any) -> Tensor:
    """:func:`mlp` of tensors for which the call is bound, without autocast."""
    y: Tensor = call.run(tensors)[0] if values_only() else apply_mlp(call, *tensors)
    return y


def forward(x: Tensor, layers: Sequence[Operands], call: Call) -> tuple[Tensor, SavedMlp, tuple[Tensor, ...]]:
    fwd = OPS[call.backend].mlp_fwd
    if call.seen:
        return fwd(x, layers, call.options, call.drop, call.act, seen=call.seen, keep=call.keep)
    return fwd(x, layers, call.options, call.drop, call.act)


class Mlp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, x: Tensor, *flat: Tensor | None) -> Any:
        with autocast_off(x):
            y, saved, norms = forward(x, layers_of(flat, call.specs, x.dtype, call.backend), call)
        # vmap carries no None out of a Function: an empty vector says it. y is there already; values before g are rarely kept.
        h, h_down, gate, up, _, *before = saved
        parts = (h, h_down, gate, up) if all([t is None for t in before]) else (h, h_down, gate, up, *before)
        return y, *(x.new_empty(0) if t is None else t for t in parts), *norms

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, x = inputs[:2]
        flat = list(inputs[2:])  # as in linear.py
        y, *rest = output
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        inside = without_norm(flat, 3)
        parts = len(rest) - len(inside)
        for at, c in zip(inside, rest[parts:], strict=True):
            flat[at] = c
        h, h_down, gate, up, *before = (None if t.dim() == 1 else t for t in rest[:parts])
        before = before or [None] * 3
        kept = y if before[2] is None and ctx.call.options[2].save != "nothing" else None
        saved = SavedMlp(h, h_down, gate, up, kept, *before)
        ctx.save_for_backward(*saved, x, *flat)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        call, rest = ctx.call, reread(ctx, "dora_mlp")  # once: checkpoint forms them again when they are asked for
        saved, x, flat = rest[:PARTS], rest[PARTS], rest[PARTS + 1 :]
        need_x, needs = ctx.needs_input_grad[1], needs_of(ctx.needs_input_grad[2:], 3)
        if no_graph() and not autocast_on(dy):
            bwd, layers = OPS[call.backend].mlp_bwd, layers_of(flat, call.specs, x.dtype, call.backend)
            dx, grads = bwd(dy, x, layers, call.options, call.drop, call.act, SavedMlp(*saved), need_x, needs)
        else:
            flags = (need_x, *(need for each in needs for need in each))
            found = restore_none(apply(MlpBwd, call, flags, dy, x, *saved, *flat), flags)
            dx, grads = found[0], [Grads(*found[i : i + 5]) for i in range(1, len(found), 5)]
        #      call
        return None, dx, *to_inputs(grads, len(flat))


class EagerMlp(Mlp):
    """Without what torch.func and compilers ask for: what is saved need not be an output."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:  # type: ignore[override]
        y, saved = call.run(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *tensors)
        return y


apply_mlp = eager_apply(EagerMlp)


class MlpBwd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, flags: tuple[bool, ...], dy: Tensor, x: Tensor, *rest: Any) -> Any:
        needs = [Needs(*flags[i : i + 5]) for i in range(1, len(flags), 5)]
        bwd, layers = OPS[call.backend].mlp_bwd, layers_of(rest[PARTS:], call.specs, x.dtype, call.backend)
        saved = SavedMlp(*rest[:PARTS])
        with autocast_off(x):
            dx, grads = bwd(dy, x, layers, call.options, call.drop, call.act, saved, flags[0], needs)
        return drop_none((dx, *(d for each in grads for d in each)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative("dora_mlp")
