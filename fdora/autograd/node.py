"""Autograd of layers that read the same x, and of a gated MLP: one node. A single layer is a group of one.

What differs from call to call is data: :class:`Call` says which forward runs (the layers' or the MLP's), whether
products are of 8-bit numbers and whether a residual is added; ``parts`` are the activations that the forward saves.
An 8-bit product rounds x, which counts as the identity: backward runs in the dtype of x on the decoded W, or rounds dz for
dx alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fdora._records import (
    NO_NEEDS,
    WIDTH,
    Bound,
    Dropout,
    Grads,
    Needs,
    Operands,
    Options,
    Saved,
    SavedMlp,
)
from fdora._torch import apply, eager_apply, is_traced, no_graph, values_only
from fdora.autograd._ops import (
    OPS,
    autocast_off,
    autocast_on,
    gradients_of,
    reread,
)
from fdora.autograd.norm import through_norm
from fdora.autograd.weight import Specs, flat_of, layers_of, readable, specs_of, without_norm
from fdora.eager.act import ACTS as ACTS

ALL_MLP = 4  # parts of an MLP: h of gate and up, h of down, and the outputs of gate and up; a layer's: h


class Call(NamedTuple):
    """What is no tensor in a call of several layers."""

    options: tuple[Options, ...]
    drop: Dropout
    backend: str
    act: str | None = None
    """Of a gated MLP, whose layers are gate, up and down."""
    full: bool = False
    """Of one layer: c, given as a constant, is the norm of its W, A and B. Its gradient goes on, and is
    added to theirs before autograd sees any: a sum of autograd's is a pass over each."""
    fp8: bool = False
    """Forward multiplies 8-bit numbers, and every W is a QuantWeight of e4m3."""
    fp8_grad: bool = False
    """The same of backward, for dx."""
    residual: bool = False
    """Of one layer: a residual comes behind the operands. It is not saved."""
    seen: tuple[Tensor, ...] = ()
    """Of each layer, as of give_norm, where the forward asks for the norms: then no layer has its c."""
    keep: bool = True
    """Whether backward wants these norms."""
    specs: Specs = None
    """Of quantised weights; :func:`layers` fills it in."""
    run: Bound | None = None
    """The plan of all calls like one; :func:`bound` fills it in."""

    @property
    def counts(self) -> tuple[int, int]:
        """How many outputs, and parts."""
        return (len(self.options), 1) if self.act is None else (1, ALL_MLP)

    @property
    def name(self) -> str:
        single = "dora_linear" if len(self.options) == 1 else "dora_linear_group"
        return single if self.act is None else "dora_mlp"


def filled(call: Call, specs: Specs, run: Bound | None) -> Call:
    """Dynamo of torch 2.8 does not trace ``_replace``."""
    options, drop, backend, act, full, fp8, fp8_grad, residual, seen, keep, *_ = call
    return Call(options, drop, backend, act, full, fp8, fp8_grad, residual, seen, keep, specs, run)


def layers(x: Tensor, operands: Sequence[Operands], call: Call, residual: Tensor | None = None) -> Sequence[Tensor]:
    """One y for each layer; of an MLP the one y."""
    if no_graph() and not autocast_on(x):
        if not call.fp8:
            operands = readable(operands, x.dtype, call.backend)
        return forward(x, operands, call, residual)[0]
    specs = specs_of(operands)
    call = call if specs is None else filled(call, specs, None)
    added = () if residual is None else (residual,)
    found: Any = apply(Layers, call, x, *flat_of(operands, specs), *added)
    return found[: call.counts[0]]


def bound(tensors: tuple[Tensor | None, ...], call: Call, autocast: bool = False) -> Call:
    """For all calls of plain tensors with these facts where nothing traces: x as products take it, and
    the flat operands of all layers, A and c given. ``autocast``: calls come under it."""
    ops, act = OPS[call.backend], () if call.act is None else (call.act,)
    bind = ops.mlp_bound if act else ops.layers_bound
    run = bind(tensors, call.options, call.drop, *act, specs=call.specs or (), fp8=call.fp8)
    return filled(call, call.specs, without_autocast(run, tensors[0]) if autocast else run)


def without_autocast(run: Bound, like: Any) -> Bound:
    """As :func:`autocast_off`, whose context takes the host as long as a launch."""
    device = like.device.type

    def bound(tensors: tuple[Any, ...]) -> Any:
        torch.set_autocast_enabled(device, False)
        try:
            return run(tensors)
        finally:
            torch.set_autocast_enabled(device, True)

    return bound


def bound_layers(tensors: tuple[Any, ...], call: Any) -> Sequence[Tensor]:
    """:func:`layers` of tensors for which the call is bound."""
    if values_only():
        return call.run(tensors)[0]
    return apply_bound(call, *tensors)


def forward(x: Tensor, operands: Sequence[Operands], call: Call, residual: Tensor | None = None) -> tuple[Any, ...]:
    """Each y; the parts; of each layer what dm reads, and whether that is the value before g; the norms
    that were formed."""
    ops, options, drop = OPS[call.backend], call.options, call.drop
    asks: dict[str, Any] = {"seen": call.seen, "keep": call.keep} if call.seen else {"fp8": True} if call.fp8 else {}
    if call.act is not None:
        y, of_mlp, norms = ops.mlp_fwd(x, operands, options, drop, call.act, **asks)
        return ([y], *of_mlp.apart(), norms)
    ys, saved = ops.layers_fwd(x, operands, options, drop, residual, **asks)
    return ys, (saved.h,), saved.kept, saved.pre_scale, saved.norms


def gradients(
    call: Call,
    dys: Sequence[Tensor | None],
    x: Tensor,
    flat: Any,
    saved: tuple[Any, Any, tuple[bool, ...]],
    need_x: bool,
    needs: Sequence[Needs],
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of each layer."""
    ops, (parts, kept, pre_scale) = OPS[call.backend], saved
    fp8: dict[str, Any] = {"fp8": True} if call.fp8_grad else {}
    operands: Sequence[Operands] = layers_of(flat, call.specs)
    if call.specs is not None and not call.fp8_grad:
        operands = readable(operands, x.dtype, call.backend)
    if call.act is not None:
        of_mlp, dy = SavedMlp.joined(parts, kept, pre_scale), dys[0]
        assert dy is not None
        return ops.mlp_bwd(dy, x, operands, call.options, call.drop, call.act, of_mlp, need_x, needs, **fp8)
    of_layers = Saved(parts[0], kept, pre_scale)
    if not call.full:
        return ops.layers_bwd(dys, x, operands, call.options, call.drop, of_layers, need_x, needs, **fp8)
    A, B, m, _, bias = needs[0]
    asked = [Needs(A, B, m, A or B, bias)]
    dx, found = ops.layers_bwd(dys, x, operands, call.options, call.drop, of_layers, need_x, asked)
    dA, dB, dm, dc, dbias = found[0]
    if dc is not None:
        own = Operands(*flat[:WIDTH])  # W in its own dtype, whatever x was cast to
        assert own.A is not None and own.B is not None and own.c is not None
        s = call.options[0].s
        dA, dB = through_norm(dc, own.W, own.A, own.B, own.c, s, (A, B), (dA, dB), call.backend)
    return dx, [Grads(dA, dB, dm, None, dbias)]


def to_save(ctx: Any, flat: Sequence[Tensor | None], count: int, specs: Specs) -> Sequence[Tensor | None]:
    """The operands that save_for_backward takes. The node itself holds on to the others: parameters, all of a quantised W whose
    codes are one, and norms, whoever formed them. These are small or outlive the node, and torch's checkpoint would only find
    them again, by three functions of Python for each saved tensor: 12 us, and 47 of the 99 that a decoder layer of codes saves.
    Seeds are saved: a checkpoint that does not keep torch's generator draws others, and backward reads h of the second forward.
    """
    own: list[Tensor | None] = [t if type(t) is Parameter else None for t in flat]
    own[4 : WIDTH * count : WIDTH] = flat[4 : WIDTH * count : WIDTH]
    at = WIDTH * len(specs or ())
    for spec in specs or ():
        end = at + (0 if spec is None else spec.count)
        if at < end and isinstance(flat[at], Parameter):
            own[at:end] = flat[at:end]
        at = end
    try:
        ctx.own, ctx.versions = own, [t._version for t in own if t is not None]
    except RuntimeError:  # made in inference mode: torch says why they cannot be saved
        ctx.own = ctx.versions = []
        return flat
    return [t if mine is None else None for t, mine in zip(flat, own, strict=True)]


def all_of(ctx: Any, saved: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """All operands again, once their versions are compared, as torch does for what it saves."""
    if not ctx.own:
        return saved
    if ctx.versions != [t._version for t in ctx.own if t is not None]:
        raise RuntimeError(
            f"fdora.{ctx.call.name}: W, A, B, m, bias and the norm must be left as they are until backward, got one that was "
            "modified by an inplace operation. Call backward before the optimizer's step, or run the forward again."
        )
    return [t if mine is None else mine for t, mine in zip(saved, ctx.own, strict=True)]


class Layers(torch.autograd.Function):
    """Saves the parts and, for the gradient of each m, the output itself or the value before g; the
    operands are the caller's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, x: Tensor, *flat: Tensor | None) -> Any:
        residual = None
        if call.residual:
            *flat, residual = flat  # type: ignore[assignment]
        operands: Sequence[Operands] = layers_of(flat, call.specs)
        if call.specs is not None and not call.fp8:  # which reads the codes itself
            operands = readable(operands, x.dtype, call.backend)
        with autocast_off(x):
            ys, parts, kept, pre_scale, norms = forward(x, operands, call, residual)
        # vmap carries no None out of a Function: an empty vector says it
        out = [*ys, *[x.new_empty(0) if t is None else t for t in parts]]
        if True in pre_scale:
            each = zip(kept, pre_scale, strict=True)
            out += [t if has and t is not None else x.new_empty(0) for t, has in each]
        return (*out, *norms)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call = ctx.call = inputs[0]
        flat = list(inputs[2:-1] if call.residual else inputs[2:])  # Dynamo of torch 2.11 wants a list
        n, (count, width) = len(call.options), call.counts
        rest = output[count:]
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)  # else torch fills zeros for the parts on every backward
        inside = without_norm(flat, n)
        norms = rest[len(rest) - len(inside) :]
        for at, c in zip(inside, norms, strict=True):
            flat[at] = c
        if is_traced():
            ctx.own = ctx.versions = []
        else:
            flat = [*to_save(ctx, flat, n, call.specs)]
        parts = [None if t.dim() == 1 else t for t in rest[:width]]
        before = rest[width : len(rest) - len(inside)]
        ctx.pre_scale = tuple([t.dim() == 2 for t in before]) if before else (False,) * n
        ys = [None] * (n - count) + list(output[:count])  # of an MLP down's alone
        kept = [None if o.save == "nothing" else y for o, y in zip(call.options, ys, strict=True)]
        if before:
            each = zip(before, ctx.pre_scale, kept, strict=True)
            kept = [v if has else y for v, has, y in each]
        ctx.save_for_backward(*parts, *kept, inputs[1], *flat)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        call, n = ctx.call, len(ctx.pre_scale)
        count, width = call.counts
        dys = dys[:count]
        if all([dy is None for dy in dys]):
            return (None,) * len(ctx.needs_input_grad)
        rest = reread(ctx, call.name)  # once: checkpoint forms them again when they are asked for
        parts, kept, x = tuple(rest[:width]), tuple(rest[width : width + n]), rest[width + n]
        flat = all_of(ctx, rest[width + n + 1 :])
        flags = ctx.needs_input_grad[2:]
        need_x = ctx.needs_input_grad[1]
        needs = [Needs(*flags[i + 1 : i + 6]) for i in range(0, n * WIDTH, WIDTH)]
        saved = parts, kept, ctx.pre_scale
        if no_graph() and not autocast_on(x):
            dx, grads = gradients(call, dys, x, flat, saved, need_x, needs)
        else:
            if call.act is None:
                needs = [NO_NEEDS if dy is None else each for dy, each in zip(dys, needs, strict=True)]
            asked = (need_x, *(need for each in needs for need in each))
            found = gradients_of(call.name, asked, _flat_gradients, x, call, ctx.pre_scale, asked, *dys, *parts, *kept, *flat)
            dx, grads = found[0], [Grads(*found[i : i + 5]) for i in range(1, len(found), 5)]
        d_residual = () if not call.residual else (dys[0] if flags[-1] else None,)
        #               W     A B m c bias  seed; autograd casts that of bias
        of_layers = [d for each in grads for d in (None, *each, None)]
        stored = [None] * (len(flat) - len(of_layers))
        #      call
        return None, dx, *of_layers, *stored, *d_residual


def _flat_gradients(x: Tensor, call: Call, pre_scale: tuple[bool, ...], flags: tuple[bool, ...], *rest: Any) -> Any:
    """:func:`gradients` of tensors, and as tensors, one behind the other."""
    n, (count, width) = len(pre_scale), call.counts
    dys, parts = rest[:count], rest[count : count + width]
    kept = rest[count + width : count + width + n]
    needs = [Needs(*flags[i : i + 5]) for i in range(1, len(flags), 5)]
    dx, grads = gradients(call, dys, x, rest[count + width + n :], (parts, kept, pre_scale), flags[0], needs)
    return dx, *(d for each in grads for d in each)


class BoundLayers(Layers):
    """The same of a call that is bound to its plan, without what torch.func and compilers ask for: what
    is saved need not be an output. torch tells the two ways apart by the class."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:  # type: ignore[override]
        ys, parts, kept, ctx.pre_scale = call.run(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        flat = to_save(ctx, tensors[1:], len(call.options), call.specs)
        ctx.save_for_backward(*parts, *kept, tensors[0], *flat)
        return tuple(ys)


apply_bound = eager_apply(BoundLayers)
