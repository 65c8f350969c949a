"""Layers that read the same x, in one call: q, k, v by dora_linear_group, a gated MLP by dora_mlp.

A block is known by the source of its forward, so that another one, or one that somebody patched, is left alone. An MLP keeps
x, gate and up, and forms what lies between again: half of what its three layers keep on their own. Its class is exchanged
like that of a layer. q, k and v stay modules that the attention calls one by one: the first computes for all, the others hand
over what waits for them.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdora.functional import DoraLayer, dora_linear_group, dora_mlp
from fdora.integrations._peft.dora import Dora
from fdora.integrations._peft.linear import Call, Linear, active, call_of, hooked

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MLP_FORWARD = "self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))"
ACTS: dict[str, Any] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}


class Shared:
    """q, k and v of one attention: the outputs of the last call that nobody has asked for yet, and the x they belong to."""

    def __init__(self, layers: list[Any]):
        self.layers = layers
        self.waiting: tuple[Tensor, bool, dict[int, Tensor]] | None = None

    def output(self, layer: Any, x: Tensor) -> Tensor | None:
        """This layer's y; None where it is to be computed alone."""
        place = next((i for i, each in enumerate(self.layers) if each is layer), None)
        if place is None:  # a replica of DataParallel
            return None
        waiting, self.waiting = self.waiting, None
        if waiting is not None and waiting[0] is x and waiting[1] == torch.is_grad_enabled() and place in waiting[2]:
            y = waiting[2].pop(place)
            self.waiting = waiting if waiting[2] else None
            return y
        calls = together(self.layers, x) if place == 0 else None
        if calls is None:
            return None
        y, *rest = dora_linear_group(x, [of(c) for c in calls], **options(calls))
        self.waiting = (x, torch.is_grad_enabled(), dict(enumerate(rest, 1)))
        return y


class Mlp(nn.Module):
    """Comes before the model's own class; see :func:`block`."""

    STOCK: type
    ACT: Any

    def forward(self, x: Tensor) -> Tensor:
        calls = together([self._modules[name] for name in MLP], x)
        if calls is None:
            stock: Any = self.STOCK
            return stock.forward(self, x)
        return dora_mlp(x, *map(of, calls), act=self.ACT, **options(calls))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return blank, (self.STOCK, self.ACT), self.__dict__


@cache
def block(stock: Any, act: str) -> Any:
    bases: Any = (Mlp, stock)
    return type(stock.__name__, bases, {"STOCK": stock, "ACT": act, "__module__": stock.__module__})


def blank(stock: type, act: str) -> Any:
    cls = block(stock, act)
    return cls.__new__(cls)


def together(layers: list[Any], x: Tensor) -> list[Call] | None:
    """What each layer would do with x, if all do it in one call of dora_linear, nobody listens, and p is the same."""
    found: list[Call] = []
    for layer in layers:
        adapter = active(layer) if type(layer) is Linear and not hooked(layer) else None
        call = None if adapter is None else call_of(layer, x, *adapter)
        if call is None or (found and call.p != found[0].p):
            return None
        found.append(call)
    return found


def of(call: Call) -> DoraLayer:
    w = call.weights
    return DoraLayer(w.W, w.A, w.B, w.m, call.s, call.bias, call.counted_norm())


def options(calls: list[Call]) -> dict[str, Any]:
    return {"dropout_p": calls[0].p, "dropout_mode": "peft", "keep_inner": any(c.variant.keep_inner for c in calls)}


def act_of(module: Any) -> str | None:
    """Which activation it is, by its values."""
    v = torch.linspace(-4, 4, 33)
    with torch.no_grad():
        found = module.act_fn(v)
    return next((name for name, f in ACTS.items() if torch.equal(f(v), found)), None)


def source(module: nn.Module) -> str:
    try:
        return re.sub(r"\s+", "", inspect.getsource(type(module).forward))
    except (OSError, TypeError):  # made by hand, or built in
        return ""


def fuse_blocks(model: nn.Module) -> int:
    """How many were found."""
    found = 0
    for module in list(model.modules()):
        parts = module._modules
        if adapted(parts, MLP) and MLP_FORWARD in source(module) and (act := act_of(module)) is not None:
            stock: Any = type(module)
            module.__class__ = block(stock, act)
            found += 1
        text = source(module) if adapted(parts, ATTENTION) else ""
        if text and all(f"self.{name}(hidden_states)" in text for name in ATTENTION):
            layers: list[Any] = [parts[name] for name in ATTENTION]
            for adapter in set.intersection(*(set(layer.lora_variant) for layer in layers)):
                shared = Shared(layers)
                for layer in layers:
                    layer.lora_variant[adapter].shared = shared
            found += 1
    return found


def adapted(parts: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(type(parts.get(name)) is Linear for name in names)


def unfuse_blocks(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Mlp):
            module.__class__ = module.STOCK
        for variant in getattr(module, "lora_variant", {}).values():
            if isinstance(variant, Dora):
                variant.shared = None
