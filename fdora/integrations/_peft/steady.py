"""The short way of a call: what layers take where nothing about them, or about x, is out of the ordinary.

Most calls are like the one before them. They are asked as little as is enough to know that: the layer for its adapter, its
modules for hooks and classes (fdora/_plain.py), the tensors for their facts (verdict.py). Whatever is another goes the whole
way (:func:`fdora.integrations._peft.linear.call_of`), which serves it or says why not. Nothing here runs in a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import dora
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora._plain import Entry, parameters
from fdora._records import Operands
from fdora._torch import jit_tracing
from fdora.integrations._peft.dora import FUSED, Dora
from fdora.integrations._peft.sharded import HOOKS
from fdora.quant import QuantWeight

QUIET = (*HOOKS, "forward", "_dora_cache")  # the last one: what DoraCaching left is for the whole way to clear


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

    def operands(self) -> Operands:
        """With the norm, counted; where nothing traces. W is no QuantWeight."""
        variant, W, A, B, m, bias, s, _, _ = self
        variant.calls[FUSED] += 1
        kept = variant.kept
        c = kept.given(W, A, B, s, False)
        if c is None:
            c = kept.own(W, W, A, B, s)
        return Operands(W, A, B, m, c if variant.detach else variant.with_gradient(c, W, A, B, s), bias, None)

    def ends(self, layer: Any, x: Tensor) -> Any:
        """What the block of a vision transformer wants done beside the layer; None where it is to do that itself."""
        if self.p or self.dtype not in (None, x.dtype):
            return None
        return self.variant.tail.take(layer, x, self.W.shape[0])

    def norm(self) -> Tensor:
        variant, W, A, B, s = self.variant, self.W, self.A, self.B, self.s
        return variant.with_gradient(variant.kept.of(owner(W), W, A, B, s), W, A, B, s)


def owner(W: Any) -> Any:
    """The tensor whose storage says whether W is another one."""
    return W.tensors[0] if isinstance(W, QuantWeight) else W


@lru_cache(1024)
def spec_of(name: str, training: bool, kind: type | None) -> tuple[Entry, ...]:
    """The modules of a layer with this adapter, and of the layer itself if it is of this class."""
    entries: list[Entry] = [
        (("base_layer",), nn.Linear, ("weight", "bias")),
        (("lora_A", name), nn.Linear, ("weight",)),
        (("lora_B", name), nn.Linear, ("weight",)),
        (("lora_magnitude_vector", name), DoraLinearLayer, ("weight",)),
    ]
    if training:  # else its dropout drops nothing
        entries.append((("lora_dropout", name), nn.Identity, ()))
    return tuple(entries if kind is None else [((), kind, ()), *entries])


def variant_of(module: Any) -> tuple[str, Dora] | None:
    """The one active adapter, and its variant; None where that takes a longer look."""
    if module._disable_adapters or module.merged_adapters:
        return None
    name = module._active_adapter
    if type(name) is list and len(name) == 1:
        name = name[0]
    variant = module.lora_variant.get(name) if type(name) is str else None
    return (name, variant) if isinstance(variant, Dora) and variant.tail is None else None  # who has a tail may be told more


def plain_call(module: Any, name: str, variant: Dora, kind: type | None = None) -> Call | None:
    """The call of a layer whose modules are as PEFT made them; with ``kind`` nobody listens to the layer either."""
    s = module.scaling[name]
    if type(s) is not float or module.fan_in_fan_out or jit_tracing() or getattr(dora, "ENABLE_DORA_CACHING", False):
        return None
    found = parameters(module, spec_of(name, module.training, kind), QUIET)
    if found is None:
        return None
    W, bias, A, B, m = found
    if W is None or A is None or B is None or m is None or W.requires_grad:
        return None
    return Call(variant, W, A, B, m, bias, s, 0.0)


def plain_calls(layers: Sequence[Any]) -> list[Call] | None:
    """Of several layers that nobody listens to."""
    calls: list[Call] = []
    for layer in layers:
        found = variant_of(layer)
        call = None if found is None else plain_call(layer, *found, type(layer))
        if call is None:
            return None
        calls.append(call)
    return calls
