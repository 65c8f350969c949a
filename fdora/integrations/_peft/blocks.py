"""Blocks of a model whose layers run in one call; patterns.py says which.

Gated MLPs of transformers and timm run in one call of dora_mlp. It keeps x, gate and up, and forms what lies between again:
half of what its three layers keep on their own. The class is exchanged like that of a layer. q, k and v stay modules that the
attention calls one by one: the first computes for all, the others hand over what waits for them.

In blocks of vision transformers, ``x + drop(scale(inner(norm(x))))`` twice, LayerScale and the sum with the residual go into
the call of the last layer before them. The block tells the layer beforehand (:class:`Tail`), and looks afterwards whether it
was heard. A layer that cannot listen returns what it always does, and the block goes on as it is written. Nothing is folded
into a layer that something else follows, listens to, or is called in another thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdora._torch import PLAIN, autocast_on, in_subgraph, is_traced, trace
from fdora.functional import DoraLayer, prepared
from fdora.functional.prepared import folded, linears, loses_inner
from fdora.integrations._hook import hooked
from fdora.integrations._norm import version
from fdora.integrations._peft.calls import active, call_of
from fdora.integrations._peft.dora import ours
from fdora.integrations._peft.fast_path import (
    Call,
    eligibility,
    given_norms,
    how_called,
    keep_route,
    keeps_inner,
    layers_of,
    ready,
    run,
)
from fdora.integrations._peft.layer import Exchanged, Layer, subclass
from fdora.integrations._peft.patterns import (
    ATTENTION,
    Branch,
    Gated,
    act_of,
    block_of,
    chain,
    forward_of,
    gated_of,
    idle,
    scale_of,
    shares_x,
)
from fdora.quant import QuantWeight


class Epilogue(NamedTuple):
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
        self.waiting: dict[Any, Epilogue] = {}

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

    def take(self, layer: Any, x: Tensor, N: int) -> Epilogue | None:
        """For the layer itself: what to do beside it, if it can be done without a dtype or a shape being another."""
        epilogue = self.waiting.get(where()) if self.waiting and self.layer() is layer else None
        if epilogue is None or autocast_on(x):
            return None
        for t, shape in ((epilogue.gamma, (N,)), (epilogue.residual, (*x.shape[:-1], N))):
            if t is not None and (type(t) not in PLAIN or t.shape != shape or t.dtype != x.dtype or t.device != x.device):
                return None
        return epilogue

    def taken(self) -> None:
        del self.waiting[where()]


def where() -> Any:
    """What is told in one thread, or in one trace, is for the same alone."""
    return trace() if torch.compiler.is_dynamo_compiling() else threading.get_ident()


def plain_forward(module: Any) -> Any:
    """The class's, beneath that of a block of ours."""
    return getattr(type(module), "FORWARD", None) or type(module).forward


class VitBlock(Exchanged):
    """A block of a vision transformer, whose halves tell their last layers what follows."""

    recognise = staticmethod(block_of)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, VitBlock):  # bound methods outlive unfuse_blocks
            return type(self).forward(self, x, *args, **kwargs)
        cls: Any = type(self)
        inside = torch.compiler.is_dynamo_compiling() and in_subgraph()
        if inside or cls.STOCK.forward is not cls.FORWARD or type(x) not in PLAIN:
            return cls.STOCK.forward(self, x, *args, **kwargs)
        how = cls.HOW
        args, kwargs = how.attends(*args, **kwargs)
        x = half(self, how.first, x, args, kwargs, how.pair)
        return half(self, how.second, x, (), {}, False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is the model's own class: nothing waits for its layers."""
        return object.__new__, (self.STOCK,), self.__dict__


def half(block: Any, branch: Branch, x: Tensor, args: tuple, kwargs: dict[str, Any], pair: bool) -> Tensor:
    """``x + drop(scale(inner(norm(x))))``, in as few steps as its last layer takes upon itself."""
    parts = block._modules
    inner, scale, drop = parts[branch.inner], parts[branch.scale] if branch.scale else None, parts[branch.drop]
    tail, h = tail_of(inner, scale), parts[branch.norm](x)
    epilogue = Epilogue(None, None)
    if tail is not None:
        epilogue = Epilogue(None if tail.scale is None else getattr(scale, tail.scale), x if idle(drop) else None)
    if tail is None or (epilogue.gamma is None and epilogue.residual is None):
        out, heard = inner(h, *args, **kwargs), False
    else:
        out, heard = listened(tail, epilogue, inner, h, args, kwargs)
    if pair:
        out, _ = out
    if heard and epilogue.residual is not None:
        return out
    out = out if scale is None or heard else scale(out)
    return drop(out) + x


def listened(tail: Tail, epilogue: Epilogue, inner: Any, h: Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """What the inner module returns, and whether its last layer did what it was told."""
    key = where()
    tail.waiting[key] = epilogue
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
    layers = [each for each in inner._modules.values() if isinstance(each, Layer)]
    return [layer for layer in layers if any([variant.tail is not None for variant in ours(layer)])]


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
            for variant in ours(each):
                variant.tail = Tail(inner, each, tuple(after), by or None, None if scale is None else type(scale).forward)
                variant.route = None  # of a call that knew of no tail
            return True
        if not isinstance(each, (nn.Identity, nn.Dropout)):
            return False
        after.append(name)
    return False


class Waiting(NamedTuple):
    """Outputs that nobody has asked for yet, by the layer's place, and what they belong to."""

    x: Tensor
    version: int | str
    grad: bool
    outputs: dict[int, Tensor]


class Shared:
    """q, k and v of one attention, or others that are called one by one on one x: the first computes all.
    ``compute(x, layers)``: in the place of the layers' own calls."""

    def __init__(self, layers: Sequence[Any], compute: Callable[..., Sequence[Tensor]] | None = None):
        self.compute = compute
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
        known = None if traced or self.compute else ready(members, x, alone=False)
        if self.compute is not None:
            y, *rest = self.compute(x, members)
        elif known is not None:
            y, *rest = prepared.call(*known)
        else:
            calls = together(members, x)
            if calls is None:
                return None
            y, *rest = run(x, calls)
        self.waiting = Waiting(x, now, grad, dict(enumerate(rest, 1))) if rest else None
        return y


def state_of(x: Tensor, traced: bool) -> int | str:
    """x's version. A trace knows of none: what waits there is for the same trace alone."""
    return trace() if traced and torch.compiler.is_dynamo_compiling() else version(x)


class Mlp(Exchanged):
    """A gated MLP in one call of dora_mlp."""

    recognise = staticmethod(gated_of)

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
            calls = together(layers, *args, mlp=True, packed=how.packed) if act is not None else None
            if calls is not None:
                tail = calls[-1].variant.tail
                epilogue = None if tail is None else calls[-1].epilogue(layers[-1], args[0])
                if epilogue is not None:
                    tail.taken()
                return mlp(args[0], calls, act, self.gate_last if how.packed else None, epilogue)  # type: ignore[arg-type]
        return cls.STOCK.forward(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in type(self).HOW.layers()
        super().__setattr__(name, value)
        if mine and not isinstance(value, Layer):  # unload, merge_and_unload
            self.__class__ = self.STOCK


def mlp(x: Tensor, calls: Sequence[Call], act: Any, gate_last: bool | None, epilogue: Epilogue | None) -> Tensor:
    """Of gate, up and down; or of both in one layer and down, where ``gate_last`` is not None: which half is the gate."""
    if gate_last is None and epilogue is None:
        return run(x, calls, act)[0]
    (p, mode, _, computes), keep_inner = how_called(calls[0]), keeps_inner(calls)
    if gate_last is None:
        gate, up, down = layers_of(calls, given_norms(calls))
    else:
        both, down = layers_of(calls, [call.norm() for call in calls])
        gate, up = halves(both, gate_last)
    if epilogue is not None:
        m, bias = folded(x.dtype, epilogue.gamma, down.m, down.bias)  # type: ignore[arg-type]
        down = down._replace(m=m, bias=bias)
        keep_inner = keep_inner or loses_inner(x.dtype, epilogue.gamma, None)
    y = linears(x, (gate, up, down), p, mode, keep_inner, act, computes)[0]
    return y if epilogue is None or epilogue.residual is None else y + epilogue.residual


def together(layers: Sequence[Any], x: Tensor, mlp: bool = False, packed: bool = False) -> list[Call] | None:
    """What each layer would do with x, if all do it in one call of dora_linear, nobody listens, and p is the same."""
    found: list[Call] = []
    for layer in layers:
        adapter = active(layer) if isinstance(layer, Layer) and not hooked(layer) else None
        call = "" if adapter is None else call_of(layer, x, *adapter)
        if isinstance(call, str) or (found and how_called(call) != how_called(found[0])):
            return None
        if mlp and call.dtype not in (None, x.dtype):  # layer by layer, what lies between has the dtype of x
            return None
        found.append(call)
    if packed and (isinstance(found[0].W, QuantWeight) or found[0].p or found[0].W.shape[0] != 2 * found[1].W.shape[1]):
        return None  # dropout draws one mask for both halves
    why, backend = eligibility(x, found, mlp and not packed)
    if backend and not packed:
        for layer, call in zip(layers, found, strict=True):
            keep_route(layer, call)
    return None if why else found


def halves(both: DoraLayer, gate_last: bool) -> tuple[DoraLayer, DoraLayer]:
    """gate and up of a layer that computes the two beside each other: rows of W, B, m, bias and c; A is that of both."""
    W, A, B, m, s, bias, c = both
    parts: Any = zip(*[(None, None) if t is None else t.chunk(2) for t in (W, B, m, bias, c)], strict=True)  # type: ignore[union-attr]
    As: Any = A, A.view(A.shape)  # type: ignore[union-attr]  # Dynamo takes no tensor twice
    first, second = (DoraLayer(W, a, B, m, s, bias, c) for a, (W, B, m, bias, c) in zip(As, parts, strict=True))
    return (second, first) if gate_last else (first, second)


def fuse_blocks(model: nn.Module) -> int:
    """Run the blocks that are known in fewer calls. How many were found."""
    found = 0
    for module in list(model.modules()):
        parts, forward = module._modules, forward_of(module)
        how, block = gated_of(forward), block_of(forward)
        stock: Any = type(module)
        if how is not None and adapted(parts, how.layers()) and act_of(getattr(module, how.act, None)) is not None:
            module.__class__ = subclass(Mlp, stock)
            found += 1
        if block is not None and sum([give_tail(module, branch) for branch in (block.first, block.second)]):
            module.__class__ = subclass(VitBlock, stock)
            found += 1
        if adapted(parts, ATTENTION) and shares_x(forward):
            layers: list[Any] = [parts[name] for name in ATTENTION]
            for adapter in set.intersection(*(set(layer.lora_variant) for layer in layers)):
                shared = Shared(layers)
                for place, layer in enumerate(layers):
                    layer.lora_variant[adapter].shared, layer.lora_variant[adapter].place = shared, place
            found += 1
    return found


def gated_mlps(model: nn.Module) -> dict[nn.Module, tuple[Gated, Any]]:
    """The modules that compute ``down(f(gate(x)) up(x))`` now, whatever their layers are, and f."""
    found = {}
    for module in model.modules():
        how = None if "forward" in module.__dict__ else gated_of(plain_forward(module))
        if how is None or how.packed or not how.serves(module):
            continue
        act = act_of(getattr(module, how.act, None))
        if act is not None:
            found[module] = how, act
    return found


def projections(module: nn.Module) -> list[nn.Module]:
    """q, k and v of a module that calls the three in this order on one x, whatever they are; none of another module."""
    return [module._modules[name] for name in ATTENTION] if shares_x(forward_of(module)) else []  # type: ignore[misc]


def adapted(parts: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(isinstance(parts.get(name), Layer) for name in names)


def unfuse_blocks(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (Mlp, VitBlock)):
            module.__class__ = module.STOCK
        for variant in ours(module):
            variant.shared = variant.tail = None
