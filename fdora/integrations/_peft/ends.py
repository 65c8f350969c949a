"""What follows the last layer of an attention or an MLP, in its own call: LayerScale as gamma, and the sum with the residual.

The block tells the layer beforehand (:class:`Tail`), and looks afterwards whether it was heard. A layer that cannot listen
returns what it always does, and the block goes on as it is written. Nothing is folded into a layer that something else
follows, listens to, or is called in another thread.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdora._torch import PLAIN, autocast_on, in_subgraph, trace
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import Dora
from fdora.integrations._peft.known import chain, forward_of
from fdora.integrations._peft.linear import Layer, active
from fdora.integrations._peft.vit import Branch, block_of, idle, scale_of


class Ends(NamedTuple):
    gamma: Tensor | None
    residual: Tensor | None


class Tail:
    """Of one layer that ends a branch. It belongs to the layers it was made for: a replica or a copy has none."""

    def __init__(self, inner: nn.Module, layer: Any, after: tuple[str, ...], scale: str | None, scales: Any):
        self.inner = weakref.ref(inner)
        self.layer = weakref.ref(layer)
        self.forward = plain_forward(inner)
        """The inner module's, when it was looked at."""
        self.scale, self.scales = scale, scales
        """LayerScale's parameter, and its forward."""
        self.after = after
        """Modules that y passes before the inner module returns it: they must be idle."""
        self.waiting: dict[Any, Ends] = {}

    def stands(self, inner: Any, layer: Any, scale: Any) -> bool:
        here: Any = self.inner() is inner and self.layer() is layer
        return (
            here
            and (scale is None or (type(scale).forward is self.scales and not hooked(scale)))
            and plain_forward(inner) is self.forward
            and not hooked(inner)
            and not hooked(layer)
            and all([idle(inner._modules.get(name)) for name in self.after])
        )

    def take(self, layer: Any, x: Tensor, N: int) -> Ends | None:
        """For the layer itself: what to do beside it, if it can be done without a dtype or a shape being another."""
        ends = self.waiting.get(where()) if self.waiting and self.layer() is layer else None
        if ends is None or autocast_on(x):
            return None
        for t, shape in ((ends.gamma, (N,)), (ends.residual, (*x.shape[:-1], N))):
            if t is not None and (type(t) not in PLAIN or t.shape != shape or t.dtype != x.dtype or t.device != x.device):
                return None
        return ends

    def taken(self) -> None:
        del self.waiting[where()]


def where() -> Any:
    """What is told in one thread, or in one trace, is for the same alone."""
    return trace() if torch.compiler.is_dynamo_compiling() else threading.get_ident()


def plain_forward(module: Any) -> Any:
    """The class's, beneath that of a block of ours."""
    return getattr(type(module), "FORWARD", None) or type(module).forward


class VitBlock(nn.Module):
    """Comes before the model's own class; see :func:`vit_block`."""

    STOCK: Any
    FORWARD: Any
    """STOCK's, when it was looked at."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, VitBlock):  # bound methods outlive unfuse_blocks
            return type(self).forward(self, x, *args, **kwargs)
        cls: Any = type(self)
        if cls.STOCK.forward is not cls.FORWARD or type(x) not in PLAIN:
            return cls.STOCK.forward(self, x, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and in_subgraph():
            return cls.STOCK.forward(self, x, *args, **kwargs)
        how = cls.HOW
        args, kwargs = how.attends(*args, **kwargs)
        x = half(self, how.first, x, args, kwargs, how.pair)
        return half(self, how.second, x, (), {}, False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return blank, (self.STOCK,), self.__dict__


@cache
def vit_block(stock: Any) -> Any:
    bases: Any = (VitBlock, stock)
    own = {"STOCK": stock, "FORWARD": stock.forward, "HOW": block_of(stock.forward), "__module__": stock.__module__}
    return type(stock.__name__, bases, own)


def blank(stock: Any) -> Any:
    """A copy: nothing waits for its layers."""
    return stock.__new__(stock)


def half(block: Any, branch: Branch, x: Tensor, args: tuple, kwargs: dict[str, Any], pair: bool) -> Tensor:
    """``x + drop(scale(inner(norm(x))))``, in as few steps as its last layer takes upon itself."""
    parts = block._modules
    inner, scale, drop = parts[branch.inner], parts[branch.scale] if branch.scale else None, parts[branch.drop]
    tail, h = tail_of(inner, scale), parts[branch.norm](x)
    ends = Ends(None, None)
    if tail is not None:
        ends = Ends(None if tail.scale is None else getattr(scale, tail.scale), x if idle(drop) else None)
    if tail is None or (ends.gamma is None and ends.residual is None):
        out, heard = inner(h, *args, **kwargs), False
    else:
        out, heard = listened(tail, ends, inner, h, args, kwargs)
    if pair:
        out, _ = out
    if heard and ends.residual is not None:
        return out
    out = out if scale is None or heard else scale(out)
    return drop(out) + x


def listened(tail: Tail, ends: Ends, inner: Any, h: Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """What the inner module returns, and whether its last layer did what it was told."""
    key = where()
    tail.waiting[key] = ends
    if torch.compiler.is_dynamo_compiling():  # a trace that fails leaves nothing; a graph may break here, not inside of a try
        out = inner(h, *args, **kwargs)
        return out, tail.waiting.pop(key, None) is None
    try:
        out = inner(h, *args, **kwargs)
    finally:
        left = tail.waiting.pop(key, None)
    return out, left is None


def tail_of(inner: Any, scale: Any) -> Tail | None:
    """That of the adapter that is active now."""
    for layer in last_layers(inner):
        found = active(layer)
        tail = None if found is None else found[1].tail
        return tail if tail is not None and tail.stands(inner, layer, scale) else None
    return None


def last_layers(inner: Any) -> list[Any]:
    """The layers of PEFT right below, those with a tail."""
    return [each for each in inner._modules.values() if isinstance(each, Layer) and has_tail(each)]


def has_tail(layer: Any) -> bool:
    return any([isinstance(v, Dora) and v.tail is not None for v in layer.lora_variant.values()])


def fuse_vit(model: nn.Module) -> int:
    """How many blocks were found, of which at least one half ends in a layer with an adapter."""
    found = 0
    for module in list(model.modules()):
        how = None if isinstance(module, VitBlock) else block_of(forward_of(module))
        if how is not None and sum([give_tail(module, branch) for branch in (how.first, how.second)]):
            stock: Any = type(module)
            module.__class__ = vit_block(stock)
            found += 1
    return found


def give_tail(block: Any, branch: Branch) -> bool:
    """Whether this half ends in a layer that may take up what follows."""
    inner, scale = block._modules[branch.inner], block._modules[branch.scale] if branch.scale else None
    by = "" if scale is None else scale_of(scale)
    if by is None or inner is None or hooked(inner):
        return False
    after: list[str] = []
    for name in chain(plain_forward(inner)):
        each = inner._modules.get(name)
        if isinstance(each, Layer):
            for variant in each.lora_variant.values():
                if isinstance(variant, Dora):
                    variant.tail = Tail(inner, each, tuple(after), by or None, None if scale is None else type(scale).forward)
                    variant.route = None  # of a call that knew of no tail
            return True
        if not isinstance(each, (nn.Identity, nn.Dropout)):
            return False
        after.append(name)
    return False


def unfuse_vit(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, VitBlock):
            module.__class__ = module.STOCK
        for variant in getattr(module, "lora_variant", {}).values():
            if isinstance(variant, Dora):
                variant.tail = None
