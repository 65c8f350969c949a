"""One DoRA layer's forward. A layer runs in one call of fdora's functions, instead of the base layer and then a correction.

Its class is exchanged for a subclass (:class:`Layer`), and back. Nothing is added to the instance, so deepcopy, pickle,
DataParallel and torch.compile see an ordinary module. What the one call does not serve runs PEFT's forward, and so our variant
(dora.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from peft.tuners.lora import dora, torchao
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from fdora._torch import PLAIN, functorch_active, in_subgraph, is_traced
from fdora.functional import dora_conv1d, dora_conv2d, dora_conv3d, dora_embedding, dora_linear, prepared
from fdora.integrations._hook import hooked
from fdora.integrations._peft.calls import active, call_of, mixed, note
from fdora.integrations._peft.dora import Dora, forget, ours, paused, release
from fdora.integrations._peft.fast_path import FUSED, Weights, eligibility, keep_route, ready, run
from fdora.integrations._peft.mesh import lies_on_mesh, on_mesh
from fdora.integrations._peft.quantised import FP8, Merging, family, refuse_merge
from fdora.integrations._peft.sharded import LISTENED, modules_of


class Layer(nn.Module):
    """Comes before PEFT's own class, whose name and parameters it has: the short way first."""

    STOCK: Any
    lora_variant: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (args or kwargs or torch.compiler.is_dynamo_compiling() or functorch_active()):
            known = ready((self,), x)
            if known is not None:
                return prepared.call(*known)[0]
        if not isinstance(self, Layer):  # bound methods outlive unfuse_layer
            return type(self).forward(self, x, *args, **kwargs)
        stock = type(self).STOCK
        if args or kwargs:
            named = kwargs.keys() == {"adapter_names"} and not args
            out = mixed(self, x, kwargs["adapter_names"]) if named else ""
            return stock.forward(self, x, *args, **kwargs) if isinstance(out, str) else out
        found = active(self)
        if found is None:
            return stock.forward(self, x)
        traced, shared = torch.compiler.is_compiling() or functorch_active(), found[1].shared
        if shared is not None and not (traced and torch.compiler.is_dynamo_compiling() and in_subgraph()):
            y = shared.output(self, x, found[1].place, traced)
            if y is not None:
                return y
        call = call_of(self, x, *found)
        why, backend = (call, "") if isinstance(call, str) else eligibility(x, (call,))
        if why is LISTENED and lies_on_mesh(self._modules["base_layer"].weight):  # type: ignore[union-attr]
            parts: Any = self
            y_or_why = paused(parts.lora_magnitude_vector[found[0]], parts.scaling[found[0]]) or on_mesh(self, *found, x)
            if not isinstance(y_or_why, str):
                found[1].count(FUSED)
                return y_or_why
            why = y_or_why
        if why or isinstance(call, str):
            note(found[1], why)
            return stock.forward(self, x)
        variant = call.variant
        epilogue = None if variant.tail is None else call.epilogue(self, x)
        if backend and epilogue is None:
            keep_route(self, call)
        if epilogue is None and variant.detach:
            return run(x, (call,))[0]
        variant.count(FUSED)
        _, W, A, B, m, bias, s, p, mode, *_ = call
        full = epilogue is None and not variant.detach  # one node, which takes the gradient on through the norm
        how: Any = {"dropout_p": p, "dropout_mode": mode, "keep_inner": variant.keep_inner, "detach": not full}
        if epilogue is not None:
            variant.tail.taken()
            how |= {"gamma": epilogue.gamma, "residual": epilogue.residual}
        return dora_linear(x, W, A, B, m, s=s, bias=bias, norm=call.norm(full), **how)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """The base weight will not come back bit for bit, whichever adapter it was."""
        stock: Any = super()
        refuse_merge(self._modules["base_layer"])
        stock.merge(*args, **kwargs)
        forget(self)

    def unmerge(self) -> None:
        """Others on this base weight may have run meanwhile."""
        stock: Any = super()
        stock.unmerge()
        forget(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        forget(self)
        if torch.__future__.get_swap_module_params_on_conversion():  # the base layer's turn comes after this
            release(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The weight may be elsewhere now, or another: ``model.to``."""
        release(self)
        super()._apply(*args, **kwargs)
        for variant in ours(self):
            variant.keep(self)
        return self


class Linear(Layer, lora.Linear):
    """PEFT's ``lora.Linear``."""

    STOCK = lora.Linear

    def resolve_lora_variant(self, **kwargs: Any) -> Any:
        """Of a new adapter: ours on codes, whose norm PEFT's cannot take."""
        made = super().resolve_lora_variant(**kwargs)
        kinds = {variant.STOCK: type(variant) for variant in ours(self)}
        on_codes = family(self._modules["base_layer"]) == FP8  # type: ignore[arg-type]
        return kinds[type(made)](made) if on_codes and type(made) in kinds else made


class TorchaoLoraLinear(Layer, Merging):
    """PEFT's, which merges as it computes."""

    STOCK = torchao.TorchaoLoraLinear


LAZY = {
    ("peft.tuners.lora.bnb", "Linear4bit"),
    ("peft.tuners.lora.bnb", "Linear8bitLt"),
    ("peft.tuners.lora.hqq", "HqqLoraLinear"),
}


class Exchanged(nn.Module):
    """Comes before a class that is known only when it is met; see :func:`subclass`."""

    STOCK: Any
    FORWARD: Any
    """STOCK's, when it was looked at."""
    HOW: Any
    """What ``recognise`` says of it."""
    recognise: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return revived, (type(self).__bases__[0], self.STOCK), self.__dict__


class Lazy(Exchanged, Layer):
    """One of these: PEFT has the class only where the package of its base layer is installed."""

    recognise = staticmethod(bool)


@cache
def subclass(kind: Any, stock: Any) -> Any:
    """The class with ``kind`` before it, under its own name."""
    own = {"STOCK": stock, "FORWARD": stock.forward, "HOW": kind.recognise(stock.forward), "__module__": stock.__module__}
    return type(stock.__name__, (kind, stock), own)


def revived(kind: Any, stock: Any) -> Any:
    cls = stock if kind.recognise(stock.forward) is None else subclass(kind, stock)  # another process may have patched it
    return cls.__new__(cls)


def fuse_layer(module: Any) -> None:
    kind: Any = type(module)
    if not isinstance(module, Layer):
        module.__class__ = subclass(Lazy, kind) if (kind.__module__, kind.__name__) in LAZY else LAYERS.get(kind, kind)


def unfuse_layer(module: Any) -> None:
    if isinstance(module, Layer):
        module.__class__ = module.STOCK


CONV: tuple[Any, ...] = (dora_conv1d, dora_conv2d, dora_conv3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAGNITUDE = (dora.DoraConv1dLayer, dora.DoraConv2dLayer, dora.DoraConv3dLayer)


class Whole(Layer):
    """A layer that is no linear one. What it is called with is found out in each call."""

    ADAPTERS = "lora_A"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, Layer):  # bound methods outlive unfuse_layer
            return type(self).forward(self, x, *args, **kwargs)
        stock = type(self).STOCK
        module: Any = self
        found = None if args or kwargs else active(module, getattr(module, self.ADAPTERS))
        if found is None:
            return stock.forward(self, x, *args, **kwargs)
        name, variant = found
        w = module.weights(x, name, variant)
        if isinstance(w, str):
            note(variant, w)
            return stock.forward(self, x)
        variant.count(FUSED)
        s = module.scaling[name]
        c = variant.with_gradient(variant.norm(w, s), w.W, w.A, w.B, s)
        return module.whole(x, name, variant.kept.frozen(module.base_layer.weight), w, s, c)


class Embedding(Whole, lora.Embedding):
    """PEFT's ``lora.Embedding``. It has dropout and does not use it."""

    STOCK, ADAPTERS = lora.Embedding, "lora_embedding_A"

    def weights(self: Any, x: Tensor, name: str, variant: Dora) -> Weights | str:
        why = not_looked_up(self, self.base_layer, self.lora_magnitude_vector[name])
        return why or weights_for(x, variant, self, name, (torch.int64, torch.int32))

    def whole(self: Any, x: Tensor, name: str, W: Tensor, w: Any, s: float, c: Tensor) -> Tensor:
        how = {"padding_idx": self.base_layer.padding_idx, "sparse": self.base_layer.sparse}
        return dora_embedding(x, W, w.A, w.B, w.m, s=s, norm=c, **how)


def not_looked_up(module: Any, base: Any, magnitude: Any) -> str:
    """Why more happens in this embedding than rows being read."""
    if type(base) is not nn.Embedding:
        return f"a {type(base).__name__} in the place of a torch.nn.Embedding"
    if type(magnitude) is not dora.DoraEmbeddingLayer or hooked(magnitude) or hooked(base):
        return LISTENED
    if base.max_norm is not None:
        return "max_norm, which rewrites the base weight"
    if base.scale_grad_by_freq:
        return "gradients divided by frequency"
    if base.sparse and is_traced():
        return "sparse gradients under torch.compile or torch.func"
    return "tensor parallel" if getattr(module, "tp_layer", None) is not None else ""


class Conv(Whole):
    """PEFT's ``lora.Conv1d``, 2d and 3d."""

    def weights(self: Any, x: Tensor, name: str, variant: Dora) -> Weights | str:
        base = self.base_layer
        n = base.weight.dim() - 2
        w = not_convolved(self, name, base, n) or weights_for(x, variant, self, name, dtypes_of(base.weight))
        return w if isinstance(w, str) or x.dim() in (n + 1, n + 2) else "an input of another number of axes"

    def whole(self: Any, x: Tensor, name: str, W: Tensor, w: Any, s: float, c: Tensor) -> Tensor:
        base, A, B = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        how = {at: getattr(base, at) for at in ("bias", "stride", "padding", "dilation", "groups")}
        return CONV[W.dim() - 3](x, W, A, B, w.m, s=s, norm=c, **how)


def not_convolved(module: Any, name: str, base: Any, n: int) -> str:
    """Why more, or something else, happens in this layer than three convolutions with one geometry."""
    lora_A, lora_B, magnitude = modules_of(module, name)
    for part in (base, lora_A, lora_B):
        if type(part) is not CONVS[n - 1]:
            return f"a {type(part).__name__} in the place of a torch.nn.Conv{n}d"
        if hooked(part):
            return LISTENED
    if type(magnitude) is not MAGNITUDE[n - 1] or hooked(magnitude):
        return LISTENED
    if base.padding_mode != "zeros":
        return "a padding mode, which PEFT's adapter does not have"
    if lora_A.stride != base.stride or lora_A.padding != base.padding or lora_A.bias is not None or lora_B.bias is not None:
        return "an adapter with a geometry or a bias of its own"
    dropout = module.lora_dropout[name]
    return "dropout with torch's mask" if module.training and type(dropout) is not nn.Identity else ""


def dtypes_of(W: Tensor) -> tuple[torch.dtype, ...]:
    """What a convolution of this weight takes."""
    if not W.is_meta and torch.is_autocast_enabled(W.device.type):
        return (torch.float16, torch.bfloat16, torch.float32)
    return (W.dtype,)


def weights_for(x: Any, variant: Dora, module: Any, name: str, wanted: tuple[torch.dtype, ...]) -> Weights | str:
    """The weights, if fdora's functions take them and x."""
    if type(x) not in PLAIN:
        return f"the input is a {type(x).__name__}"
    w = variant.ready(module, name)
    if isinstance(w, str):
        return w
    if x.device != w.W.device:
        return "the input is on another device"
    return w if x.dtype in wanted else f"a {x.dtype} input for a {w.W.dtype} base weight"


class Conv1d(Conv, lora.Conv1d):
    STOCK = lora.Conv1d


class Conv2d(Conv, lora.Conv2d):
    STOCK = lora.Conv2d


class Conv3d(Conv, lora.Conv3d):
    STOCK = lora.Conv3d


LAYERS: dict[type, Any] = {kind.STOCK: kind for kind in (Linear, TorchaoLoraLinear, Embedding, Conv1d, Conv2d, Conv3d)}
