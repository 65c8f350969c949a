"""What one call of a layer is, and the layers whose call is like the one before it.

What a layer is called with is found out once (:func:`fdora.integrations._peft.linear.call_of`, verdict.py). Where nothing about
it was out of the ordinary it keeps a route (fdora/_plain.py): which modules were looked at, and how they were. As long as they
are so, and tensors lie as some did that were served before, the next call only follows it. Else it is found out again.
Nothing here runs in a trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from peft.tuners.lora import dora
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora import _plain
from fdora._plain import Entry, Route
from fdora._records import Operands
from fdora._torch import jit_tracing
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

    def norm(self) -> Tensor:
        variant, W, A, B, s = self.variant, self.W, self.A, self.B, self.s
        return variant.with_gradient(variant.kept.of(owner(W), W, A, B, s), W, A, B, s)


class Ready(NamedTuple):
    """A call of which nothing is left to check: for checked_linears and checked_mlp."""

    layers: list[Operands]
    s: tuple[float, ...]
    keep_inner: bool
    backend: str


def ready(layers: tuple[Any, ...], x: Tensor, together: bool = False, mlp: bool = False) -> Ready | None:
    """``together``: their own hooks would not run. With norms, counted; where nothing traces."""
    found = _plain.follow(layers, QUIET if together else (), QUIET)
    if found is None or jit_tracing() or getattr(dora, "ENABLE_DORA_CACHING", False):
        return None
    tensors: tuple[Any, ...] = (x,)
    scalars: tuple[float, ...] = ()
    for each in found:
        tensors, scalars = tensors + each[2:], (*scalars, each[1])
        if each[2] is None or each[2].requires_grad:
            return None
    backend = settled(tensors, mlp)
    if not backend:
        return None
    norms = found[0][0].kept.norms
    given = None if norms is None else norms.c_of_all(found)
    operands, keep_inner = [], False
    for i, (variant, s, W, A, B, m, bias) in enumerate(found):
        variant.calls[FUSED] += 1
        c = variant.kept.eager(W, W, A, B, s) if given is None else given[i]
        operands.append(Operands(W, A, B, m, c if variant.detach else variant.with_gradient(c, W, A, B, s), bias, None))
        keep_inner = keep_inner or variant.keep_inner
    return Ready(operands, scalars, keep_inner, backend)


def keep_route(layer: Any, call: Call) -> None:
    """For the calls that follow this one, which had nothing left to check."""
    variant, name = call.variant, layer._active_adapter
    name, variant.route = name[0] if type(name) is list else name, None
    if variant.tail is not None or type(call.s) is not float:  # who has a tail may be told more
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
    found = _plain.follow((layer,), (), QUIET)
    if found is None or any([t is not wanted for t, wanted in zip(found[0][2:], call[1:6], strict=True)]):
        variant.route = None  # its tensors come another way


def owner(W: Any) -> Any:
    """The tensor whose storage says whether W is another one."""
    return W.tensors[0] if isinstance(W, QuantWeight) else W
