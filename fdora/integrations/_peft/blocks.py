"""Layers that read the same x, in one call: q, k, v by dora_linear_group, a gated MLP by dora_mlp.

A block is known by the whole code of its forward (known.py), so that another one, or one that somebody patched, is left
alone. An MLP keeps x, gate and up, and forms what lies between again: half of what its three layers keep on their own. Its
class is exchanged like that of a layer. q, k and v stay modules that the attention calls one by one: the first computes for
all, the others hand over what waits for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdora._torch import is_traced, trace
from fdora.functional import DoraLayer, prepared
from fdora.functional.prepared import folded, linears, loses_inner
from fdora.integrations._hook import hooked
from fdora.integrations._norm import version
from fdora.integrations._peft.dora import FUSED, Dora
from fdora.integrations._peft.ends import fuse_vit, unfuse_vit
from fdora.integrations._peft.gated import Gated, gated_of
from fdora.integrations._peft.known import ATTENTION, act_of, forward_of, shares_x
from fdora.integrations._peft.linear import Layer, active, call_of
from fdora.integrations._peft.steady import Call, keep_route, norms_of, ready
from fdora.integrations._peft.verdict import verdict
from fdora.quant import QuantWeight


class Waiting(NamedTuple):
    """Outputs that nobody has asked for yet, by the layer's place, and what they belong to."""

    x: Tensor
    version: int | str
    grad: bool
    outputs: dict[int, Tensor]


class Shared:
    """q, k and v of one attention."""

    def __init__(self, layers: list[Any]):
        self.layers = [weakref.ref(layer) for layer in layers]  # they hold this: a cycle would outlive merge_and_unload
        self.waiting: Waiting | None = None

    def output(self, layer: Any, x: Tensor, place: int, traced: bool) -> Tensor | None:
        """This layer's y; None where it is to be computed alone."""
        if self.layers[place]() is not layer:  # a replica of DataParallel
            return None
        waiting, now, grad = self.waiting, state_of(x, traced), torch.is_grad_enabled()
        if waiting is not None:
            self.waiting = None
            if place in waiting.outputs and waiting.x is x and waiting.version == now and waiting.grad == grad:
                left = {i: each for i, each in waiting.outputs.items() if i != place}
                self.waiting = Waiting(x, now, grad, left) if left else None
                return waiting.outputs[place]
        if place:
            return None
        members = tuple([each() for each in self.layers])
        known = None if traced else ready(members, x, alone=False)
        if known is not None:
            y, *rest = prepared.call(*known)
        else:
            found = together(members, x)
            if found is None:
                return None
            dtype = found.calls[0].dtype  # y of quantised layers goes back to that of x
            ys = linears(x if dtype is None else x.to(dtype), found.layers(), *found.options())
            y, *rest = ys if dtype is None else [each.to(x.dtype) for each in ys]
        self.waiting = Waiting(x, now, grad, dict(enumerate(rest, 1)))
        return y


def state_of(x: Tensor, traced: bool) -> int | str:
    """x's version. A trace knows of none: what waits there is for the same trace alone."""
    return trace() if traced and torch.compiler.is_dynamo_compiling() else version(x)


class Mlp(nn.Module):
    """Comes before the model's own class; see :func:`block`."""

    STOCK: type
    FORWARD: Any
    """STOCK's, when it was looked at."""
    HOW: Any
    """How it is written, see gated.py."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, Mlp):  # bound methods outlive unfuse_blocks
            return type(self).forward(self, *args, **kwargs)
        cls: Any = type(self)  # self.FORWARD would be bound
        how: Gated = cls.HOW
        if len(args) == 1 and not kwargs and cls.STOCK.forward is cls.FORWARD and how.serves(self):
            act: Any = act_of(
                self._modules[how.act] if how.act in self._modules else getattr(self, how.act, None)
            )  # it may be another one by now, or have hooks
            layers = [self._modules[name] for name in how.layers()]
            known = None if act is None or how.packed or is_traced() else ready(tuple(layers), *args, alone=False, act=act)
            if known is not None:
                return prepared.call(*known)[0]
            found = together(layers, *args, mlp=True, packed=how.packed) if act is not None else None
            if found is not None:
                down = found.calls[-1]
                ends = None if down.variant.tail is None else down.ends(layers[-1], args[0])
                if ends is not None:
                    down.variant.tail.taken()
                gate_last = how.packed and self.gate_last
                return found.mlp(args[0], act, None if not how.packed else gate_last, ends)  # type: ignore[arg-type]
        return cls.STOCK.forward(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in type(self).HOW.layers()
        super().__setattr__(name, value)
        if mine and not isinstance(value, Layer):  # unload, merge_and_unload
            self.__class__ = self.STOCK

    def __reduce_ex__(self, protocol: Any) -> Any:
        return blank, (self.STOCK,), self.__dict__


@cache
def block(stock: Any) -> Any:
    bases: Any = (Mlp, stock)
    own = {"STOCK": stock, "FORWARD": stock.forward, "HOW": gated_of(stock.forward), "__module__": stock.__module__}
    return type(stock.__name__, bases, own)


def blank(stock: Any) -> Any:
    cls = block(stock) if gated_of(stock.forward) is not None else stock  # another process may have patched it
    return cls.__new__(cls)


class Together(NamedTuple):
    """What layers do in one call."""

    calls: list[Call]

    def layers(self) -> list[DoraLayer]:
        return [of(call, c) for call, c in zip(self.calls, norms_of(self.calls), strict=True)]

    def options(self) -> tuple[float, bool]:
        """Dropout's p, and whether to keep the value before g."""
        return self.calls[0].p, any([call.variant.keep_inner for call in self.calls])

    def mlp(self, x: Tensor, act: Any, gate_last: bool | None, ends: Any) -> Tensor:
        """Of gate, up and down; or of both in one layer and down, where ``gate_last`` is not None: which half is the gate."""
        if gate_last is None:
            gate, up, down = self.layers()
        else:
            both, down = [of(call, call.norm()) for call in self.calls]
            gate, up = halves(both, gate_last)
        p, keep_inner = self.options()
        if ends is None:
            return linears(x, (gate, up, down), p, keep_inner, act)[0]
        m, bias = folded(x.dtype, ends.gamma, down.m, down.bias)  # type: ignore[arg-type]
        keep_inner = keep_inner or loses_inner(x.dtype, ends.gamma, None)
        y = linears(x, (gate, up, down._replace(m=m, bias=bias)), p, keep_inner, act)[0]
        return y if ends.residual is None else y + ends.residual


def together(layers: Sequence[Any], x: Tensor, mlp: bool = False, packed: bool = False) -> Together | None:
    """What each layer would do with x, if all do it in one call of dora_linear, nobody listens, and p is the same."""
    found: list[Call] = []
    for layer in layers:
        adapter = active(layer) if isinstance(layer, Layer) and not hooked(layer) else None
        call = "" if adapter is None else call_of(layer, x, *adapter)
        if isinstance(call, str) or (found and (call.p, call.dtype) != (found[0].p, found[0].dtype)):
            return None
        if mlp and call.dtype not in (None, x.dtype):  # layer by layer, what lies between has the dtype of x
            return None
        found.append(call)
    if packed and (isinstance(found[0].W, QuantWeight) or found[0].p or found[0].W.shape[0] != 2 * found[1].W.shape[1]):
        return None  # dropout draws one mask for both halves
    why, backend = verdict(x, found, mlp and not packed)
    if backend and not packed:
        for layer, call in zip(layers, found, strict=True):
            keep_route(layer, call)
    return None if why else Together(found)


def halves(both: DoraLayer, gate_last: bool) -> tuple[DoraLayer, DoraLayer]:
    """gate and up of a layer that computes the two beside each other: rows of W, B, m, bias and c; A is that of both."""
    W, A, B, m, s, bias, c = both
    parts: Any = zip(*[(None, None) if t is None else t.chunk(2) for t in (W, B, m, bias, c)], strict=True)  # type: ignore[union-attr]
    As: Any = A, A.view(A.shape)  # type: ignore[union-attr]  # Dynamo takes no tensor twice
    first, second = (DoraLayer(W, a, B, m, s, bias, c) for a, (W, B, m, bias, c) in zip(As, parts, strict=True))
    return (second, first) if gate_last else (first, second)


def of(call: Call, c: Tensor) -> DoraLayer:
    variant, W, A, B, m, bias, s, _, _ = call
    variant.count(FUSED)
    return DoraLayer(W, A, B, m, s, bias, c)


def fuse_blocks(model: nn.Module) -> int:
    """How many were found."""
    found = 0
    for module in list(model.modules()):
        parts, forward = module._modules, forward_of(module)
        how = gated_of(forward)
        if how is not None and adapted(parts, how.layers()) and act_of(getattr(module, how.act, None)) is not None:
            stock: Any = type(module)
            module.__class__ = block(stock)
            found += 1
        if adapted(parts, ATTENTION) and shares_x(forward):
            layers: list[Any] = [parts[name] for name in ATTENTION]
            for adapter in set.intersection(*(set(layer.lora_variant) for layer in layers)):
                shared = Shared(layers)
                for place, layer in enumerate(layers):
                    layer.lora_variant[adapter].shared, layer.lora_variant[adapter].place = shared, place
            found += 1
    return found + fuse_vit(model)


def adapted(parts: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(isinstance(parts.get(name), Layer) for name in names)


def unfuse_blocks(model: nn.Module) -> None:
    unfuse_vit(model)
    for module in model.modules():
        if isinstance(module, Mlp):
            module.__class__ = module.STOCK
        for variant in getattr(module, "lora_variant", {}).values():
            if isinstance(variant, Dora):
                variant.shared = None
