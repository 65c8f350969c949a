"""Autograd of linear layers that read the same x: one node. A single layer is a group of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import NO_NEEDS, WIDTH, Bound, Dropout, Grads, Needs, Operands, Options, Saved
from fdora._torch import apply, eager_apply, no_graph, values_only
from fdora.autograd._ops import OPS, autocast_off, autocast_on, drop_none, no_second_derivative, reread, restore_none
from fdora.autograd.norm import through_norm
from fdora.autograd.weight import Specs, flat_of, layers_of, readable, specs_of, without_norm


class Call(NamedTuple):
    """What is no tensor in a call of several layers."""

    options: tuple[Options, ...]
    drop: Dropout
    backend: str
    specs: Specs = None
    """Of quantised weights; :func:`linear` fills it in."""
    run: Bound | None = None
    """For :func:`eager_linear`, which :func:`bound` fills in."""
    full: bool = False
    """Of one layer: c, given as a constant, is the norm of its W, A and B. Its gradient goes on, and is added to theirs before
    autograd sees any: a sum of autograd's is a pass over each."""
    seen: tuple[Tensor, ...] = ()
    """Of each layer, as of give_norm, where the forward is to ask for the norms: then no layer has its c."""
    keep: bool = True
    """Whether somebody wants these norms: backward."""


def linear(x: Tensor, layers: Sequence[Operands], call: Call) -> Sequence[Tensor]:
    """One y for each layer."""
    if no_graph() and not autocast_on(x):
        return forward(x, readable(layers, x.dtype, call.backend), call)[0]
    specs = specs_of(layers)
    call = call if specs is None else Call(call.options, call.drop, call.backend, specs)
    return apply(Linear, call, x, *flat_of(layers, specs))[: len(layers)]


def bound(tensors: tuple[Tensor | None, ...], call: Call) -> Call:
    """For all calls of plain tensors with these facts where nothing traces: x, and the operands of all layers, W dense, A and c
    given."""
    run = OPS[call.backend].layers_bound(tensors, call.options, call.drop)
    return Call(call.options, call.drop, call.backend, None, run, call.full)


def eager_linear(tensors: tuple[Any, ...], call: Any) -> Sequence[Tensor]:
    """:func:`linear` of tensors for which the call is bound, without autocast."""
    if values_only():
        ys: Sequence[Tensor] = call.run(tensors)[0]
        return ys
    return apply_linear(call, *tensors)


def forward(x: Tensor, layers: Sequence[Operands], call: Call) -> tuple[Sequence[Tensor], Saved]:
    fwd = OPS[call.backend].layers_fwd
    if call.seen:
        return fwd(x, layers, call.options, call.drop, seen=call.seen, keep=call.keep)
    return fwd(x, layers, call.options, call.drop)


def needs_of(flags: Sequence[bool], count: int) -> list[Needs]:
    """From needs_input_grad of the flat operands: A, B, m, c, bias of each of so many layers."""
    return [Needs(*flags[i + 1 : i + 6]) for i in range(0, count * WIDTH, WIDTH)]


def to_inputs(grads: Sequence[Grads], count: int) -> list[Tensor | None]:
    """The gradients in the places of the flat operands, which are so many; autograd casts that of bias."""
    #              W     A B m c bias  seed
    found = [d for each in grads for d in (None, *each, None)]
    return found if len(found) == count else [*found, *[None] * (count - len(found))]  # none of packed tensors


def outputs(x: Tensor, ys: Sequence[Tensor], saved: Saved) -> tuple[Tensor, ...]:
    """What a forward returns: each y, and what is saved and no argument."""
    h, kept, pre_scale, norms = saved
    out = [*ys] if h is None else [*ys, h]
    if True in pre_scale:  # vmap carries no None out of a Function: an empty vector says it
        out += [t if has and t is not None else x.new_empty(0) for t, has in zip(kept, pre_scale, strict=True)]
    return (*out, *norms)


def backward(ctx: Any, *dys: Tensor | None) -> Any:
    """Of :class:`Linear`; no method that another Function calls, which a compiler would not follow."""
    call, n = ctx.call, len(ctx.pre_scale)
    dys = dys[:n]
    if all([dy is None for dy in dys]):
        return (None,) * len(ctx.needs_input_grad)
    # once: checkpoint forms them again when they are asked for
    h, *rest = reread(ctx, "dora_linear" if n == 1 else "dora_linear_group")
    kept, x, flat = tuple(rest[:n]), rest[n], rest[n + 1 :]
    need_x, needs = ctx.needs_input_grad[1], needs_of(ctx.needs_input_grad[2:], n)
    if no_graph() and not autocast_on(x):
        dx, grads = _gradients(call, dys, x, flat, Saved(h, kept, ctx.pre_scale), need_x, needs)
    else:
        needs = [NO_NEEDS if dy is None else each for dy, each in zip(dys, needs, strict=True)]
        flags = (need_x, *(need for each in needs for need in each))
        found = restore_none(apply(LinearBwd, call, ctx.pre_scale, flags, x, h, *dys, *kept, *flat), flags)
        dx, grads = found[0], [Grads(*found[i : i + 5]) for i in range(1, len(found), 5)]
    #      call
    return None, dx, *to_inputs(grads, len(flat))


def _gradients(
    call: Call, dys: Sequence[Tensor | None], x: Tensor, flat: Any, saved: Saved, need_x: bool, needs: Sequence[Needs]
) -> tuple[Tensor | None, list[Grads]]:
    bwd, layers = OPS[call.backend].layers_bwd, layers_of(flat, call.specs, x.dtype, call.backend)
    if not call.full:
        return bwd(dys, x, layers, call.options, call.drop, saved, need_x, needs)
    A, B, m, _, bias = needs[0]
    dx, found = bwd(dys, x, layers, call.options, call.drop, saved, need_x, [Needs(A, B, m, A or B, bias)])
    dA, dB, dm, dc, dbias = found[0]
    if dc is not None:
        own = Operands(*flat[:WIDTH])  # W in its own dtype, whatever x was cast to
        assert own.A is not None and own.B is not None and own.c is not None
        dA, dB = through_norm(dc, own.W, own.A, own.B, own.c, call.options[0].s, (A, B), (dA, dB), call.backend)
    return dx, [Grads(dA, dB, dm, None, dbias)]


class Linear(torch.autograd.Function):
    """Saves x, h and, for the gradient of each m, the output itself or the value before g; the operands are the caller's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, x: Tensor, *flat: Tensor | None) -> Any:
        with autocast_off(x):
            ys, saved = forward(x, layers_of(flat, call.specs, x.dtype, call.backend), call)
        return outputs(x, ys, saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, x = inputs[:2]
        flat = list(inputs[2:])  # what a star gathers, Dynamo (torch 2.11) takes for a tuple
        n = len(call.options)
        rest = output[n:]
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)  # else torch fills zeros for h and the like on every backward
        inside = without_norm(flat, n)
        for at, c in zip(inside, rest[len(rest) - len(inside) :], strict=True):
            flat[at] = c
        h, before = None, rest[: len(rest) - len(inside)]
        if any([A is not None for A in flat[1 : n * WIDTH : WIDTH]]):
            h, *before = before
        kept = [None if o.save == "nothing" else y for o, y in zip(call.options, output[:n], strict=True)]
        ctx.pre_scale = (False,) * n
        if before:
            ctx.pre_scale = tuple(t.dim() == 2 for t in before)
            kept = [v if has else y for v, has, y in zip(before, ctx.pre_scale, kept, strict=True)]
        ctx.call = call
        ctx.save_for_backward(h, *kept, x, *flat)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        return backward(ctx, *dys)


class EagerLinear(Linear):
    """Without what torch.func and compilers ask for: what is saved need not be an output."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:  # type: ignore[override]
        ys, h, kept, ctx.pre_scale = call.run(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, *kept, *tensors)
        return tuple(ys)


apply_linear = eager_apply(EagerLinear)


class LinearBwd(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, pre_scale: tuple[bool, ...], flags: tuple[bool, ...], x: Tensor, h: Tensor, *rest: Any) -> Any:
        n = len(pre_scale)
        dys, kept = rest[:n], rest[n : 2 * n]
        needs = [Needs(*flags[i : i + 5]) for i in range(1, len(flags), 5)]
        with autocast_off(x):
            dx, grads = _gradients(call, dys, x, rest[2 * n :], Saved(h, kept, pre_scale), flags[0], needs)
        return drop_none((dx, *(d for each in grads for d in each)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn = "dora_linear" if len(inputs[1]) == 1 else "dora_linear_group"

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative(ctx.fn)
