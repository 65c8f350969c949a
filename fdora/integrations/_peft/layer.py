"""One DoRA layer's forward. Initialisation, merge and checkpoint keys stay PEFT's.

What cannot be served goes to PEFT's code, and is counted.

A layer runs in one call of fdora's functions, instead of the base layer and then a correction: its class is exchanged for a
subclass (:class:`Layer`), and back. Nothing is added to the instance, so deepcopy, pickle, DataParallel and torch.compile see
an ordinary module. What the one call does not serve runs PEFT's forward, and so our variant (:class:`Dora`), what one adapter
adds to one layer in PEFT's own slot for that: ``layer.lora_variant[adapter]``. PEFT hands over ``result``, the base layer's
output with its bias. With h = g (1 - g for the bias) that is enough:

    y = g (result - bias) + bias + g s lora = compose(result, lora, g, s, (1 - g) bias)

Batches of several adapters (``adapter_names=``) are one call of dora_linear_multi (:func:`mixed`). PEFT serves plain LoRA
there, no DoRA. Nothing is kept but each adapter's own norm: the bank is stacked for every call from the adapters that the batch
names. At the end: the adapters of a model as banks for dora_linear_multi, and back.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import dora, torchao, variants
from peft.tuners.lora import layer as lora
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from fdora import FdoraError
from fdora._plain import Route
from fdora._records import DropoutMode
from fdora._torch import PLAIN, functorch_active, in_subgraph, is_traced, jit_tracing
from fdora.functional import (
    DoraLayer,
    DoraParams,
    dora_compose,
    dora_conv1d,
    dora_conv2d,
    dora_conv3d,
    dora_delta,
    dora_embedding,
    dora_linear,
    dora_linear_multi,
    dora_norm,
    dora_scale,
    dora_stack,
    dora_unstack,
    prepared,
    select_backend,
)
from fdora.functional.prepared import attached, kernel_rows, linears
from fdora.integrations._hook import hooked
from fdora.integrations._norm import KeptNorm
from fdora.integrations._peft.fast_path import (
    FUSED,
    Call,
    Weights,
    dtypes,
    given_norms,
    keep_route,
    obstacle,
    ready,
    served,
    unfit,
    verdict,
)
from fdora.integrations._peft.quantised import (
    BNB4,
    BNB8,
    Held,
    Merging,
    compute_dtype,
    dont_pack,
    family,
    look,
    mend,
    misread,
)
from fdora.integrations._peft.sharded import LISTENED, gather, init_on_mesh, leaf, lies_on_mesh, listened, on_mesh, weight_of
from fdora.quant import QuantWeight

EPS = 1e-12  # dora_scale's floor of c
NO_DROPOUT: DropoutMode = "lora"
COMPOSED = "composed"  # how a call of the base layer, and then of its correction, is counted


class Dora:
    """Goes into ``layer.lora_variant[adapter]`` in the place of PEFT's, which it keeps and falls back to.

    It carries a norm and counters, so one object belongs to one adapter of one layer. A copy or a pickle starts without them.
    """

    STOCK: type
    MADE_WITH: DropoutMode = "peft"  # what dropout means in those that PEFT makes, see enable

    def __init__(self, stock: Any = None):
        self.stock = self.STOCK() if stock is None else stock
        self.keep_inner = False
        self.detach = True
        self.dropout_mode: DropoutMode = Dora.MADE_WITH
        self.shared: Any = None  # with the layers that read the same x, see patterns.py
        self.place = 0  # among these
        self.tail: Any = None  # what may follow the layer in its call, see patterns.py
        self.calls: Counter[str] = Counter()
        self.why_not_fused = ""
        self.kept = KeptNorm()
        self.route: Route | None = None  # how its last call was found out, see fast_path.py
        self.held = Held()
        self.base = "", ""  # what quantised.py said of the base layer when use_fdora looked

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("stock", "keep_inner", "detach", "base", "dropout_mode")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stock"])  # type: ignore[misc]
        self.keep_inner, self.base = state["keep_inner"], state["base"]
        self.detach, self.dropout_mode = state.get("detach", True), state.get("dropout_mode", "peft")  # a pickle of before

    def look(self, base: Any) -> tuple[str, str]:
        """Whose quantised layer it is, and why its product is its own. No compiler needs to follow how that is found out."""
        return self.base if is_traced() else look(base)

    def weights(self, module: Any, adapter: str) -> Weights | str:
        """The tensors of one adapter, or why fdora cannot take them."""
        raise NotImplementedError

    def ready(self, module: Any, adapter: str) -> Weights | str:
        return paused(module.lora_magnitude_vector[adapter], module.scaling[adapter]) or self.weights(module, adapter)

    def keep(self, module: Any) -> None:
        """The base weight may be another: make room for its norm."""
        self.kept.make_room(None)

    def count(self, path: str) -> None:
        if not torch.compiler.is_compiling():
            self.calls[path] += 1

    def norm(self, w: Weights, s: float) -> Tensor:
        return self.kept.of(w.owner, w.W, w.A, w.B, s)

    def with_gradient(self, c: Tensor, W: Any, A: Tensor, B: Tensor, s: float) -> Tensor:
        """c, whose gradient reaches A and B where use_fdora was asked for that."""
        return c if self.detach else attached("use_fdora", c, W, A, B, s, select_backend(W).name)

    def drops(self, module: Any, adapter: str) -> bool:
        """Whether dropout changes what the layer computes now."""
        return bool(module.training) and not isinstance(module.lora_dropout[adapter], nn.Identity)

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        """The layer's output, from that of its base layer."""
        s, base = module.scaling[active_adapter], module.get_base_layer()
        lora_A, lora_B, dropout = (part[active_adapter] for part in (module.lora_A, module.lora_B, module.lora_dropout))
        g, bias = self.scale_and_bias(module, w, s, result, base.bias)
        dropped = self.drops(module, active_adapter)
        x = dropout(x) if dropped else x
        lora = lora_B(lora_A(x))
        if not dropped or self.dropout_mode == "lora":
            return self.composed(result, lora, g, s, bias)
        return self.corrected(base, w, x.to(result.dtype), result, (lora, g, s, bias))

    def composed(self, result: Tensor, lora: Tensor, g: Tensor, s: float, bias: Tensor | None) -> Tensor:
        """``g (result + s lora) + bias``, bias being what of it is not in g times that of the result."""
        raise NotImplementedError

    def corrected(self, base: Any, w: Weights, x: Tensor, result: Tensor, rest: tuple[Any, ...]) -> Tensor:
        """The result, which saw all of x, and what PEFT adds of what dropout has left of it: ``(g - 1) x W^T + g s lora``.
        ``rest`` is what :meth:`composed` takes behind the result."""
        raise NotImplementedError

    def scale_and_bias(
        self, module: Any, w: Weights, s: float, result: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """g, and (1 - g) bias: what is left to add where result has the bias in it already."""
        if reused(module):
            c = self.norm(w, s)
        else:
            c = dora_norm(w.W, w.A, w.B, s=s)
            if not torch.compiler.is_compiling():
                self.kept.drop()
        c = self.with_gradient(c, w.W, w.A, w.B, s)
        g = dora_scale(w.m, c).to(torch.promote_types(result.dtype, torch.float32))
        if bias is None:
            return g, None
        g = torch.where(c == 0, 0, g)  # such a row is its bias; a large g would cancel against 1 - g
        return g, (1 - g) * bias

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        w = self.ready(module, active_adapter)
        if isinstance(w, str):
            return self.fall_back(w, module, active_adapter, x, result, **kwargs)
        self.count(COMPOSED)
        return self.compose(module, active_adapter, w, x, result)

    def fall_back(self, why: str, module: Any, adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        others = self.dropout_mode == "lora" and self.drops(module, adapter)
        self.count(f"stock: {why}{', and so with dropout as PEFT means it' if others else ''}")
        return self.stock.forward(module, active_adapter=adapter, x=x, result=result, **kwargs).to(result.dtype)

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        self.stock.init(module, adapter_name=adapter_name, **kwargs)

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        with merging(module, active_adapter):
            return self.stock.merge_safe(module, active_adapter, orig_weight)

    def merge_unsafe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        with merging(module, active_adapter):
            self.stock.merge_unsafe(module, active_adapter, orig_weight)

    def unmerge(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        norm = module._caches[f"{active_adapter}-weight_norm"]
        with merging(module, active_adapter):
            weight = self.stock.unmerge(module, active_adapter, orig_weight)
        if bool((norm <= EPS).any()):  # W + s B A was 0 there, and W' / g is 0 / 0 where m is 0, too
            dead = self.rows(module, norm <= EPS, weight)
            weight = torch.where(dead, -module.get_delta_weight(active_adapter).to(weight.dtype), weight)
        return weight

    def rows(self, module: Any, v: Tensor, weight: Tensor) -> Tensor:
        """v, one value for each output, shaped to be broadcast against the base weight."""
        along = (1, -1) if getattr(module, "fan_in_fan_out", False) else (-1, *[1] * (weight.dim() - 1))
        return v.view(along)


def forget(module: Any) -> None:
    for variant in module.lora_variant.values():
        if isinstance(variant, Dora):
            variant.kept.forget()
            variant.held = Held()


def release(module: Any) -> None:
    """Forget, and let go of the base weight: torch.utils.swap_tensors refuses one that somebody refers to weakly."""
    for variant in module.lora_variant.values():
        if isinstance(variant, Dora):
            variant.kept.make_room(None)
            variant.held = Held()


@contextmanager
def merging(module: Any, adapter: str) -> Iterator[None]:
    """PEFT's merge, with dora_scale's floor under its norm: a row of zeros is no 0 / 0. No norm of before holds after it."""
    layer = module.lora_magnitude_vector[adapter]
    weight_norm = layer.get_weight_norm
    layer.get_weight_norm = lambda *args, **kwargs: weight_norm(*args, **kwargs).clamp_min(EPS)
    try:
        yield
    finally:
        del layer.get_weight_norm
        forget(module)


def paused(magnitude: Any, s: Any) -> str:
    """Why PEFT's code runs for now, whatever the parameters are; empty where fdora's can."""
    if exported():
        return "torch.jit.trace or torch.onnx.export"
    if type(s) is not float and isinstance(s, Tensor):
        return "a scaling that is a tensor (prepare_model_for_compiled_hotswap)"
    return caching(magnitude)


def exported() -> bool:
    """Whether operators of torch alone may run. torch.onnx.export traces, or compiles: asking it costs as much as a layer."""
    if torch.compiler.is_compiling():
        return torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
    return jit_tracing()


def caching(magnitude: Any) -> str:
    """Whether peft.helpers.DoraCaching is on. Once it is not, what it kept is dropped, as PEFT's own forward would."""
    if getattr(dora, "ENABLE_DORA_CACHING", False):  # 0.18 has none
        return "DoraCaching is on"
    if magnitude.__dict__.get("_dora_cache"):
        magnitude._cache_clear()
    return ""


def reused(module: Any) -> bool:
    """Whether every merge passes through a variant. A plain LoRA adapter beside ours changes the base weight on its own."""
    return len(module.lora_variant) == len(module.scaling)


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
        why, backend = (call, "") if isinstance(call, str) else verdict(x, (call,))
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
        variant, keep_inner = call.variant, call.variant.keep_inner
        ends = None if variant.tail is None else call.ends(self, x)
        if backend and ends is None:
            keep_route(self, call)
        variant.count(FUSED)
        _, W, A, B, m, bias, s, p, mode, dtype = call
        x, given = (x if dtype is None else x.to(dtype)), x.dtype
        if ends is not None:
            variant.tail.taken()
            end = {"gamma": ends.gamma, "residual": ends.residual, "dropout_p": p, "dropout_mode": mode}
            return dora_linear(x, W, A, B, m, s=s, bias=bias, norm=call.norm(), keep_inner=keep_inner, **end)
        if variant.detach:
            y = linears(x, (DoraLayer(W, A, B, m, s, bias, given_norms((call,))[0]),), p, mode, keep_inner)[0]
        else:  # one node, which takes the gradient on through the norm
            how: Any = {"dropout_p": p, "dropout_mode": mode, "keep_inner": keep_inner, "detach": False}
            y = dora_linear(x, W, A, B, m, s=s, bias=bias, norm=call.norm(full=True), **how)
        return y if dtype is None else y.to(given)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """The base weight will not come back bit for bit, whichever adapter it was."""
        stock: Any = super()
        stock.merge(*args, **kwargs)
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
        for variant in self.lora_variant.values():
            if isinstance(variant, Dora):
                variant.keep(self)
        return self


class Linear(Layer, lora.Linear):
    """PEFT's ``lora.Linear``."""

    STOCK = lora.Linear


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


def active(module: Any, of: Any = None) -> tuple[str, Dora] | None:
    """The one adapter that is active, and its variant; None where PEFT's forward has to run. ``of``: all adapters."""
    if module._disable_adapters or module.merged_adapters:
        return None
    adapters, named = module._modules["lora_A"]._modules if of is None else of, module._active_adapter
    names = [name for name in ([named] if type(named) is str else named) if name in adapters]
    variants = [module.lora_variant.get(name) for name in names]
    if len(names) == 1 and isinstance(variants[0], Dora):
        return names[0], variants[0]
    for variant in variants:
        note(variant, "several active adapters")
    return None


def note(variant: Any, why: str) -> None:
    if isinstance(variant, Dora) and not torch.compiler.is_compiling():
        variant.why_not_fused = why


def call_of(module: Any, x: Tensor, name: str, variant: Dora) -> Call | str:
    """The one call, but for what :func:`verdict` says of its tensors; or why it is not made."""
    parts = module._modules  # an attribute of a module costs ten times a look into its dict
    base, lora_A, lora_B, magnitude, dropout = (
        parts["base_layer"],
        parts["lora_A"]._modules[name],
        parts["lora_B"]._modules[name],
        parts["lora_magnitude_vector"]._modules[name],
        parts["lora_dropout"]._modules[name],
    )
    kind, why = variant.look(base)
    if type(base) is not nn.Linear and not kind:  # another quantised layer, a wrapper that shards
        return f"a {type(base).__name__} in the place of a torch.nn.Linear"
    sharded = hooked(base)
    if sharded and listened(base):
        return LISTENED
    if why:
        return why
    leaves: Any = lora_A, lora_B, magnitude
    if type(lora_A) is not nn.Linear or type(lora_B) is not nn.Linear or any([hooked(part) for part in leaves]) or sharded:
        sharded = True
        leaves = [leaf(part, of) for part, of in zip(leaves, (nn.Linear, nn.Linear, DoraLinearLayer), strict=True)]
        why = next((each for each in leaves if isinstance(each, str)), "")
        if why:
            return why
        magnitude = leaves[2].inner
    elif type(magnitude) is not DoraLinearLayer:
        return LISTENED
    p, mode = 0.0, NO_DROPOUT
    if type(dropout) is not nn.Identity and module.training:
        if not draws(dropout, x):
            return "dropout with torch's mask"
        if dropout.training and dropout.p:
            p, mode = dropout.p, variant.dropout_mode
    if module.fan_in_fan_out:
        return "a transposed base weight"
    s = module.scaling[name]
    why = paused(magnitude, s)
    if why:
        return why
    if sharded:
        A, B, m = [each.weight() for each in leaves]
    else:
        A, B, m = [part._parameters.get("weight") for part in leaves]
        if A is None or B is None or m is None:  # FSDP1 holds views of its flat parameter in their places
            A, B, m = [part.weight for part in leaves]
    if not kind:
        W, bias = base._parameters.get("weight"), base._parameters.get("bias")
        if W is None or sharded:
            W, bias = base.weight, base.bias
        if W.requires_grad and not W.is_leaf:
            W = variant.kept.frozen(W)
        return Call(variant, W, A, B, m, bias, s, p, mode)
    dtype = compute_dtype(base, kind, x)
    quant = variant.held.of(base, kind, dtype)
    if isinstance(quant, str):
        return quant
    if m.dtype not in (torch.float32, quant.dtype):  # PEFT takes it from a weight of the state's dtype
        m = m.float()
    return Call(variant, quant, A, B, m, base.bias, s, p, mode, dtype)


def draws(dropout: nn.Module, x: Tensor) -> bool:
    """Whether kernels draw the mask: no dropped copy of x, no stored mask. Elsewhere PEFT's own module is the faster way."""
    return type(dropout) is nn.Dropout and dropout.p < 1 and not hooked(dropout) and select_backend(x).name == "triton"


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
        return "hooks on the layer's parts"
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
    lora_A, lora_B, magnitude = (part[name] for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector))
    for part in (base, lora_A, lora_B):
        if type(part) is not CONVS[n - 1]:
            return f"a {type(part).__name__} in the place of a torch.nn.Conv{n}d"
        if hooked(part):
            return "hooks on the layer's parts"
    if type(magnitude) is not MAGNITUDE[n - 1] or hooked(magnitude):
        return "hooks on the layer's parts"
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


class Member(NamedTuple):
    """One adapter of a layer."""

    params: DoraParams  # m None: plain LoRA
    s: float
    call: Call | None
    """Of a DoRA adapter."""


def mixed(module: Any, x: Tensor, names: Any) -> Tensor | str:
    """The layer's output for a batch whose row i is adapter ``names[i]``'s; or why it is left to PEFT."""
    if module._disable_adapters or module.merged_adapters or not isinstance(names, (list, tuple)):
        return "no adapter is active"
    if x.dim() < 2 or len(names) != len(x):
        return "not one adapter name for each row"
    parts = module._modules["lora_A"]._modules
    used = [name for name in dict.fromkeys(names) if name in parts]  # of the others the layer has no adapter: the base layer
    found = {name: member_of(module, x, name) for name in used}
    members = [each for each in found.values() if isinstance(each, Member)]
    calls = [each.call for each in members if each.call is not None]
    if not calls:
        return next((each for each in found.values() if isinstance(each, str)), "no DoRA adapter in the batch")
    W, bias, dtype = calls[0].W, calls[0].bias, calls[0].dtype
    for each in found.values():
        why = each if isinstance(each, str) else unfit(x, W, *each.params, dtype)
        if why:
            return why
    ids = torch.tensor([used.index(name) if name in found else -1 for name in names], device=x.device)
    ids = ids.view(-1, *[1] * (x.dim() - 2)).expand(x.shape[:-1])
    params, c = of_one_dtype(members, W), torch.stack([norm_of(each, calls[0]) for each in members])
    for call in calls:
        call.variant.count(FUSED)
    y = dora_linear_multi(
        x if dtype is None else x.to(dtype),
        W,
        *dora_stack(params),
        s=[each.s for each in members],
        ids=ids,
        norm=c,
        bias=bias,
        ranks=[each.params.A.shape[0] for each in members],
    )
    return y if dtype is None else y.to(x.dtype)


def member_of(module: Any, x: Tensor, name: str) -> Member | str:
    variant = module.lora_variant.get(name)
    if isinstance(variant, Dora):
        call = call_of(module, x, name, variant)
        if isinstance(call, str) or call.p:
            return call if isinstance(call, str) else "dropout"
        return Member(DoraParams(call.A, call.B, call.m), call.s, call)
    if variant is not None:
        return f"a {type(variant).__name__} in the batch"
    lora_A, lora_B, dropout = (module._modules[part]._modules[name] for part in ("lora_A", "lora_B", "lora_dropout"))
    for part in (lora_A, lora_B):
        if type(part) is not nn.Linear or part.bias is not None or hooked(part):
            return "a plain LoRA adapter with a bias, hooks, or layers of its own"
    if type(dropout) is not nn.Identity and dropout.training:
        return "dropout"
    s = module.scaling[name]
    if isinstance(s, Tensor):
        return "a scaling that is a tensor (prepare_model_for_compiled_hotswap)"
    return Member(DoraParams(lora_A.weight, lora_B.weight, None), s, None)  # type: ignore[arg-type]


def of_one_dtype(members: list[Member], W: Any) -> list[DoraParams]:
    """Parameters that can be a bank: the wider dtype where they differ, which is exact; m of ones for plain LoRA."""
    ones = torch.ones(W.shape[0], device=W.device, dtype=torch.float32)
    whole = [p if p.m is not None else p._replace(m=ones) for p, _, _ in members]
    for part in range(3):
        dtypes = {p[part].dtype for p in whole}
        if len(dtypes) > 1:
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            whole = [DoraParams(*(t.to(wide) if i == part else t for i, t in enumerate(p))) for p in whole]
    return whole


def norm_of(member: Member, like: Call) -> Tensor:
    """c (N,): the one that the adapter keeps; ones for plain LoRA, with which g is 1."""
    if member.call is not None:
        return member.call.norm()
    dtype = torch.float64 if like.W.dtype == torch.float64 else torch.float32
    return torch.ones(like.W.shape[0], device=like.W.device, dtype=dtype)


BITSANDBYTES = ("Params4bit", "Int8Params")


class LinearVariant(Dora, variants.DoraLinearVariant):
    """nn.Linear, Conv1D, bitsandbytes, HQQ, torchao."""

    STOCK = variants.DoraLinearVariant

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        base = module.get_base_layer()
        if type(base) is nn.Linear and lies_on_mesh(base.weight):
            init_on_mesh(module, adapter_name)
        else:
            super().init(module, adapter_name, **kwargs)
        fuse_layer(module)
        self.keep(module)

    def keep(self, module: Any) -> None:
        base = module.get_base_layer()
        self.kept.make_room(None if module.fan_in_fan_out else getattr(base, "weight", None))
        self.held, self.base = Held(), look(base)
        dont_pack(base)
        mend(base)

    def ready(self, module: Any, adapter: str) -> Weights | str:
        """In a forward: what FSDP has sharded alone is gathered by a call of it."""
        return paused(module.lora_magnitude_vector[adapter], module.scaling[adapter]) or self.weights(module, adapter, gather)

    def weights(self, module: Any, adapter: str, read: Any = weight_of) -> Weights | str:
        base = module.get_base_layer()
        A, B, m = (read(part[adapter]) for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector))
        if self.look(base)[0] or quantised(base):
            found: Any = self.quantised(base, A, B, m)
        else:
            W = base.weight
            found = (W, self.kept.frozen(W) if W.requires_grad and not W.is_leaf else W)
        why = found if isinstance(found, str) else obstacle(found[1], A, B, m)
        if why:
            return why
        owner, W = found
        transposed = getattr(module, "fan_in_fan_out", False) and isinstance(W, Tensor) and W.dim() == 2
        return served(owner, W.T if transposed else W, A, B, m)

    def quantised(self, base: Any, A: Tensor, B: Tensor, m: Tensor) -> tuple[Any, Any] | str:
        """What the base weight is made from, and the weight: dense where fdora knows no such format, but PEFT does."""
        why, kind = obstacle(A, B, m), self.look(base)[0]
        if why:
            return why
        W = self.held.of(base, kind, fitting(A, B, m)) if kind else ""
        if isinstance(W, QuantWeight):
            return W.tensors[0], W
        if kind in (BNB4, BNB8):
            return W
        return base.W_q if hasattr(base, "W_q") else base.weight, dequantize_module_weight(base).detach()

    def fall_back(self, why: str, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return super().fall_back(why, module, *args, **kwargs)
        finally:
            mend(module.get_base_layer())

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return super().merge_safe(module, active_adapter, self.read(module, orig_weight))

    def unmerge(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return super().unmerge(module, active_adapter, self.read(module, orig_weight))

    def misread(self, module: Any) -> QuantWeight | None:
        """The base weight as it is, where bitsandbytes, and so PEFT, reads another."""
        base = module.get_base_layer()
        W = self.held.of(base, BNB4) if family(base) == BNB4 else None
        return W if isinstance(W, QuantWeight) and misread(base, W) else None

    def read(self, module: Any, orig_weight: Tensor) -> Tensor:
        W = self.misread(module)
        return orig_weight if W is None else W.dequantize(orig_weight.dtype)

    def composed(self, result: Tensor, lora: Tensor, g: Tensor, s: float, bias: Tensor | None) -> Tensor:
        return dora_compose(result, lora, g, s=s, bias=bias)

    def corrected(self, base: Any, w: Weights, x: Tensor, result: Tensor, rest: tuple[Any, ...]) -> Tensor:
        lora, g, s, bias = rest
        if isinstance(w.W, QuantWeight) or quantised(base):  # F.linear would keep the dequantised weight until backward
            delta = dora_delta(base(x), lora, g, s=s)
            return result + (delta if bias is None else delta + bias.to(delta.dtype))
        return result + dora_delta(F.linear(x, w.W), lora, g, s=s)


def fitting(A: Tensor, B: Tensor, m: Tensor) -> torch.dtype:
    """What a weight may stand for beside these adapters, where only its norm is asked for: that is of the weight as decoded."""
    return next((t.dtype for t in (A, B, m) if t.dtype != torch.float32), torch.float32)


def quantised(base: nn.Module) -> bool:
    """Whether PEFT's helper has a way to dequantise it."""
    if hasattr(base, "W_q"):
        return True
    kind = type(base.weight)
    return kind not in PLAIN and (kind.__name__ in BITSANDBYTES or kind.__module__.startswith("torchao."))


class EmbeddingVariant(Dora, variants.DoraEmbeddingVariant):
    """nn.Embedding: W is (V, d) and the norm runs along V, so this is the linear layer of the transposed weight."""

    STOCK = variants.DoraEmbeddingVariant

    def drops(self, module: Any, adapter: str) -> bool:
        """It has dropout and does not use it."""
        return False

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        super().init(module, adapter_name, **kwargs)
        fuse_layer(module)

    def weights(self, module: Any, adapter: str) -> Weights | str:
        W = self.kept.frozen(module.get_base_layer().weight)
        A, B = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
        m = module.lora_magnitude_vector[adapter].weight
        return obstacle(W, A, B, m) or served(W, W.T if W.dim() == 2 else W, A, B, m)

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        s = module.scaling[active_adapter]
        g, _ = self.scale_and_bias(module, w, s, result, None)
        lora = module._embed(x, w.A.T) @ w.B.T
        scale = module._get_embed_scale()  # Gemma's embeddings multiply their output
        if scale is not None:
            lora = lora * scale.to(lora.dtype)
        return dora_compose(result, lora, g, s=s)

    def rows(self, module: Any, v: Tensor, weight: Tensor) -> Tensor:
        return v.view(1, -1)


class ConvVariant(Dora):
    """nn.Conv1d, 2d, 3d: the linear layer of the flattened kernel. g lies along axis 1.

    With groups PEFT's norm is of no kernel at all: ours is of the one that the layer applies, see fdora/eager/conv.py.
    """

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        super().init(module, adapter_name, **kwargs)
        fuse_layer(module)

    def weights(self, module: Any, adapter: str, W: Any = None) -> Weights | str:
        base = module.get_base_layer()
        W = self.kept.frozen(base.weight) if W is None else W
        A, B = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        m = module.lora_magnitude_vector[adapter].weight
        why = obstacle(W, A, B, m) or dtypes(W, A, B, m)
        if why or not W.dim() == A.dim() == B.dim():
            return why or "parameters of other shapes (sharded)"
        G = base.groups
        if A.shape[2:] != W.shape[2:] or A.shape[1] != G * W.shape[1] or B.shape[:2] != (W.shape[0], A.shape[0] // G):
            return "parameters of other shapes (sharded)"
        return served(W, *kernel_rows(W, A, B, G), m.flatten())

    def fall_back(self, why: str, module: Any, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        base = module.get_base_layer()
        w = self.weights(module, adapter, base.weight.detach()) if base.groups > 1 else ""
        if isinstance(w, str):
            return super().fall_back(why, module, adapter, *args, **kwargs)
        layer: Any = module.lora_magnitude_vector[adapter]
        W: Any = w.W
        c = torch.linalg.vector_norm(W + module.scaling[adapter] * (w.B @ w.A), dim=1).view(layer.weight.shape)
        layer.get_weight_norm = lambda *_, **__: c
        try:
            return super().fall_back(why, module, adapter, *args, **kwargs)
        finally:
            del layer.get_weight_norm

    def composed(self, result: Tensor, lora: Tensor, g: Tensor, s: float, bias: Tensor | None) -> Tensor:
        along = (1, -1, *[1] * (result.dim() - 2))
        g = g.view(along)
        y = g * result + (s * g) * lora
        return (y if bias is None else y + bias.view(along)).to(result.dtype)

    def corrected(self, base: Any, w: Weights, x: Tensor, result: Tensor, rest: tuple[Any, ...]) -> Tensor:
        lora, g, s, _ = rest
        g = g.view(1, -1, *[1] * (result.dim() - 2))
        conv = getattr(F, f"conv{result.dim() - 2}d")
        base_result = conv(x, base.weight, None, base.stride, base.padding, base.dilation, base.groups)
        return (result + (g - 1) * base_result + (s * g) * lora).to(result.dtype)


def own_norm(module: Any) -> bool:
    """Whether it has a norm of ours that is another than PEFT's."""
    return any(isinstance(v, ConvVariant) for v in module.lora_variant.values()) and module.get_base_layer().groups > 1


def warn_of_groups(count: int, example: str) -> None:
    warnings.warn(
        f"fdora.use_fdora: {count} convolutions with groups, one of them `{example}`, run with the norm of the kernel that "
        "they apply. PEFT's own norm is of no kernel: an adapter that PEFT trained gives other outputs now.",
        stacklevel=3,
    )


class Conv1dVariant(ConvVariant, variants.DoraConv1dVariant):
    STOCK = variants.DoraConv1dVariant


class Conv2dVariant(ConvVariant, variants.DoraConv2dVariant):
    STOCK = variants.DoraConv2dVariant


class Conv3dVariant(ConvVariant, variants.DoraConv3dVariant):
    STOCK = variants.DoraConv3dVariant


OURS: dict[type, type] = {
    kind.STOCK: kind for kind in (LinearVariant, EmbeddingVariant, Conv1dVariant, Conv2dVariant, Conv3dVariant)
}


class LayerBank(NamedTuple):
    """Adapters of one layer, copied: what :func:`fdora.functional.dora_linear_multi` takes of them."""

    adapters: tuple[str, ...]
    """Their names, in the order of the bank. An adapter that this layer lacks is not among them."""
    params: DoraParams
    """A (G, r, K), B (G, N, r), m (G, N); a row of ones in m for plain LoRA, which wants one in the norm as well."""
    s: tuple[float, ...]
    ranks: tuple[int, ...]
    dora: tuple[bool, ...]
    """Whether each has a magnitude."""


def banks_of(layers: Iterable[tuple[str, Any]], adapters: Sequence[str] | None) -> dict[str, LayerBank]:
    fn, found, seen = "fdora.read_banks", {}, set[str]()
    if isinstance(adapters, str):
        raise FdoraError(f"{fn}: `adapters` must be a sequence of names, got {adapters!r}. Pass [{adapters!r}].")
    for path, layer in layers:
        names = [name for name in (layer.lora_A if adapters is None else adapters) if name in layer.lora_A]
        parts = {name: parts_of(fn, path, layer, name) for name in names}
        seen.update(parts)
        if not parts:
            continue
        dora = tuple(m is not None for _, _, m in parts.values())
        like = next((m for _, _, m in parts.values() if m is not None), None)
        ones: Any = None if like is None else torch.ones_like(like)
        whole = [DoraParams(A, B, ones if m is None else m) for A, B, m in parts.values()]
        ranks, s = tuple(p.A.shape[0] for p in whole), tuple(float(layer.scaling[name]) for name in parts)
        found[path] = LayerBank(tuple(parts), dora_stack(whole), s, ranks, dora)
    lacking = [name for name in adapters or () if name not in seen]
    if lacking or not found:
        have = lacking or adapters
        raise FdoraError(f"{fn}: `adapters` must be names of linear adapters, got {have}. No layer has such an adapter.")
    return found


def put_banks(layers: Iterable[tuple[str, Any]], banks: dict[str, LayerBank]) -> None:
    fn, known = "fdora.write_banks", dict(layers)
    pairs = []
    for path, bank in banks.items():
        if path not in known:
            raise FdoraError(f"{fn}: `banks` must be of this model's layers, got `{path}`. It has no such layer.")
        params = dora_unstack(bank.params, bank.ranks)
        if len(params) != len(bank.adapters):
            have = f"{len(params)} for {bank.adapters} of `{path}`"
            raise FdoraError(f"{fn}: `banks` must hold a row for each adapter, got {have}. Read them from this model.")
        for name, new in zip(bank.adapters, params, strict=True):
            if name not in known[path].lora_A:
                have = f"`{name}` of `{path}`"
                raise FdoraError(f"{fn}: `banks` must be of the model's adapters, got {have}. Read them from this model.")
            for t, value in zip(parts_of(fn, path, known[path], name), new, strict=True):
                if t is None:
                    continue
                got, want = (None if u is None else f"{tuple(u.shape)} {u.dtype}" for u in (value, t))
                if got != want:
                    raise FdoraError(
                        f"{fn}: `banks` must hold {want}, got {got} for `{name}` of `{path}`. Read them from this model."
                    )
                pairs.append((t, value))
    for t, value in pairs:  # all of them fit: a bank that is refused changes nothing
        t.copy_(value)


def parts_of(fn: str, path: str, layer: Any, name: str) -> tuple[Any, Any, Tensor | None]:
    """A, B and m, the model's own tensors. What is more than these three is refused: a bank would be another adapter."""
    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    magnitude = layer.lora_magnitude_vector
    have = ""
    if A.dim() != 2:
        have = "a convolution"
    elif any(getattr(part[name], "bias", None) is not None for part in (layer.lora_A, layer.lora_B)):
        have = "a bias beside A and B (lora_bias)"
    elif name in layer.lora_variant and name not in magnitude:
        have = f"a {type(layer.lora_variant[name]).__name__}"
    if have:
        raise FdoraError(f"{fn}: `model` must have linear adapters of A, B and m, got {have} at `{path}`. Name `adapters`.")
    return A.detach(), B.detach(), magnitude[name].weight.detach() if name in magnitude else None
