"""What one call of a layer is, and the layers whose call is like the one before it.

What a layer is called with is found out once (:func:`fdora.integrations._peft.linear.call_of`, verdict.py). Where nothing about
it was out of the ordinary it keeps a route (fdora/_plain.py): which modules were looked at, and how they were. As long as they
are so, and tensors lie as some did that were served before, the next call only follows it. Else it is found out again.
Nothing here runs in a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import dora
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora import _facts, _plain
from fdora._dispatch import forced
from fdora._plain import Entry, Route
from fdora._records import WIDTH
from fdora._torch import any_autocast, dispatch_modes, jit_tracing
from fdora.functional import prepared
from fdora.functional.prepared import check_detach, is_opaque
from fdora.integrations._peft.dora import FUSED, Dora
from fdora.integrations._peft.sharded import HOOKS
from fdora.integrations._peft.verdict import settled
from fdora.quant import QuantWeight

QUIET = (*HOOKS, "forward", "_dora_cache")  # the last one: what DoraCaching left is for call_of to clear


class Call(NamedTuple):
    """What one call of dora_linear takes."""

    variant: Dora
    W: Tensor | QuantWeight
    A: Tensor
    B: Tensor
    m: Tensor
    bias: Tensor | None
    s: float
    p: float
    dtype: torch.dtype | None = None
    """To which x is cast, and y back: of a Linear4bit, that in which it computes."""

    def ends(self, layer: Any, x: Tensor) -> Any:
        """What the block of a vision transformer wants done beside the layer; None where it is to do that itself."""
        if self.p or self.dtype not in (None, x.dtype):
            return None
        return self.variant.tail.take(layer, x, self.W.shape[0])

    def value(self) -> Tensor:
        """The norm, for a layer that takes its gradient on itself."""
        check_detach("use_fdora", self.W)
        return self.variant.kept.of(owner(self.W), self.W, self.A, self.B, self.s)

    def norm(self) -> Tensor:
        variant, W, A, B, s = self.variant, self.W, self.A, self.B, self.s
        return variant.with_gradient(variant.kept.of(owner(W), W, A, B, s), W, A, B, s)


def norms_of(calls: Sequence[Call]) -> list[Any]:
    """Of layers that run in one call. In a trace of Dynamo what the norm of each is known by: the call asks when it runs."""
    if is_opaque(calls[0].W) and all([call.variant.detach for call in calls]):
        unasked = [call.variant.kept.unasked(call.W, call.A, call.B, call.s) for call in calls]
        if all([seen is not None for seen in unasked]):
            return unasked
    return [call.norm() for call in calls]


_calls: dict[tuple, Any] = {}  # by all that they depend on
MAX_CALLS = 8192


def ready(layers: tuple[Any, ...], x: Tensor, alone: bool = True, act: str = "") -> tuple[tuple[Any, ...], Any] | None:
    """What prepared.call takes: a call of which nothing is left to check, with norms, counted.
    Where neither Dynamo nor torch.func looks on. ``alone``: the layer itself was called."""
    found = _plain.follow(layers, QUIET, alone)
    if found is None or any_autocast() or dispatch_modes() or jit_tracing() or getattr(dora, "ENABLE_DORA_CACHING", False):
        return None
    norms = found[0][0].kept.norms
    tensors = None if norms is None else norms.with_norms(x, found)
    if tensors is None and (tensors := with_own_norms(x, found, act)) is None:
        return None
    saved: tuple[bool, ...] = ()
    scalars: tuple[float, ...] = ()
    keep_inner, grad, at = False, torch.is_grad_enabled(), 1
    full = len(found) == 1 and not act and not found[0][0].detach  # one node takes the gradient through the norm on
    for variant, s, W, A, B, m, _ in found:
        if W.requires_grad or m is None:
            return None
        asked = m.requires_grad
        if full:
            check_detach("use_fdora", W)
            asked = asked or A.requires_grad or B.requires_grad
        elif not variant.detach:
            c = variant.with_gradient(tensors[at + 4], W, A, B, s)
            tensors, asked = (*tensors[: at + 4], c, *tensors[at + 5 :]), asked or c.requires_grad
        at += WIDTH
        saved, scalars, keep_inner = (*saved, grad and asked), (*scalars, s), keep_inner or variant.keep_inner
    key = _facts.facts(tensors), scalars, saved, keep_inner, act, full, forced()
    call = _calls.get(key)
    if call is None:
        backend = "" if key[0] is None else settled(x, found, bool(act))  # a norm may be what the others are not
        if not backend:
            return None
        call = prepared.bind(tensors, *key[1:4], backend, full, act or None)
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    for each in found:
        each[0].calls[FUSED] += 1
    return tensors, call


def with_own_norms(x: Tensor, found: list[Any], act: str) -> tuple[Any, ...] | None:
    """Where the model's hook gives none."""
    if any([W is None or W.requires_grad for _, _, W, *_ in found]) or not settled(x, found, bool(act)):
        return None
    tensors: list[Any] = [x]
    for variant, s, W, A, B, m, bias in found:
        tensors += W, A, B, m, variant.kept.eager(W, W, A, B, s), bias, None
    return tuple(tensors)


def keep_route(layer: Any, call: Call) -> None:
    """For the calls that follow this one, which had nothing left to check."""
    variant, name = call.variant, layer._active_adapter
    name, variant.route = name[0] if type(name) is list else name, None
    if variant.tail is not None or type(call.s) is not float:  # who has a tail may be told more
        return
    if not {int, float}.issuperset(map(type, layer.scaling.values())):  # compared by ==, which tensors do not answer
        return
    looked_at = ("_disable_adapters", "merged_adapters", "fan_in_fan_out", "training")
    own = {at: getattr(layer, at) for at in looked_at} | {"merged_adapters": [], "scaling": dict(layer.scaling)}
    entries = [
        Entry((), type(layer), (), tuple(own.items())),
        Entry(("base_layer",), nn.Linear, ("weight",)),
        Entry(("lora_A", name), nn.Linear, ("weight",)),
        Entry(("lora_B", name), nn.Linear, ("weight",)),
        Entry(("lora_magnitude_vector", name), DoraLinearLayer, ("weight",)),
        Entry(("base_layer",), nn.Linear, ("bias",)),
    ]
    if layer.training:  # else its dropout drops nothing
        entries.append(Entry(("lora_dropout", name), nn.Identity, ()))
    variant.route = Route(name, call.s, tuple(entries), sum(len(entry.parameters) for entry in entries))
    found = _plain.follow((layer,), (), False)
    if found is None or any([t is not wanted for t, wanted in zip(found[0][2:], call[1:6], strict=True)]):
        variant.route = None  # its tensors come another way


def owner(W: Any) -> Any:
    """The tensor whose storage says whether W is another one."""
    return W.tensors[0] if isinstance(W, QuantWeight) else W
