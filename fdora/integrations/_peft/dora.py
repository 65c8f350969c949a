"""What one adapter adds to one layer, in PEFT's own slot for that: ``layer.lora_variant[adapter]``.

PEFT hands over ``result``, the base layer's output with its bias. With h = g (1 - g for the bias) that is enough:

    y = g (result - bias) + bias + g s lora = compose(result, lora, g, s, (1 - g) bias)

This runs where a layer cannot run in one call (layer.py). What cannot be served at all goes to PEFT's code, and is counted.
Initialisation, merge and checkpoint keys stay PEFT's. Nothing is kept but each adapter's own norm. For each kind of layer:
variants.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from peft.tuners.lora import dora
from torch import Tensor, nn

from fdora._plain import Route
from fdora._records import DropoutMode, acc_dtype
from fdora._torch import is_traced, jit_tracing
from fdora.functional import dora_norm, dora_scale, select_backend
from fdora.functional.prepared import attached
from fdora.integrations._norm import KeptNorm
from fdora.integrations._peft.fast_path import Weights
from fdora.integrations._peft.quantised import WeightCache, look

EPS = 1e-12  # dora_scale's floor of c
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
        self.compute: Literal["fp8"] | None = None
        self.grad_compute: Literal["fp8"] | None = None
        self.transposed = False
        self.why_decoded = ""  # and not that, in its last call
        self.shared: Any = None  # with the layers that read the same x, see blocks.py
        self.place = 0  # among these
        self.tail: Any = None  # what may follow the layer in its call, see blocks.py
        self.calls: Counter[str] = Counter()
        self.why_not_fused = ""
        self.kept = KeptNorm()
        self.route: Route | None = None  # how its last call was found out, see fast_path.py
        self.held = WeightCache()
        self.base = "", ""  # what quantised.py said of the base layer when use_fdora looked

    def __getstate__(self) -> dict[str, Any]:
        names = ("stock", "keep_inner", "detach", "base", "dropout_mode", "compute", "grad_compute", "transposed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stock"])  # type: ignore[misc]
        vars(self).update({"dropout_mode": "peft"} | state)  # a pickle of before has none

    def look(self, base: Any) -> tuple[str, str]:
        """Whose quantised layer it is, and why its product is its own. No compiler needs to follow how that is found out."""
        return self.base if is_traced() else look(base, self.compute)

    def weights(self, module: Any, adapter: str) -> Weights | str:
        """The tensors of one adapter, or why fdora cannot take them."""
        raise NotImplementedError

    def ready(self, module: Any, adapter: str, *read: Any) -> Weights | str:
        weights: Any = self.weights
        return paused(module.lora_magnitude_vector[adapter], module.scaling[adapter]) or weights(module, adapter, *read)

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

    def misread(self, module: Any) -> Any:
        """The base weight as it is, where its owner, and so PEFT, reads another; else None."""
        return None

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
        g = dora_scale(w.m, c).to(acc_dtype(result.dtype))
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


def ours(module: Any) -> list[Dora]:
    """The variants of a layer that are of this class; of another module none."""
    return [each for each in getattr(module, "lora_variant", {}).values() if isinstance(each, Dora)]


def forget(module: Any) -> None:
    for variant in ours(module):
        variant.kept.forget()
        variant.held = WeightCache()


def release(module: Any) -> None:
    """Forget, and let go of the base weight: torch.utils.swap_tensors refuses one that somebody refers to weakly."""
    for variant in ours(module):
        variant.kept.make_room(None)
        variant.held = WeightCache()


@contextmanager
def merging(module: Any, adapter: str) -> Iterator[None]:
    """PEFT's merge, with dora_scale's floor under its norm: a row of zeros is no 0 / 0. No norm of before holds after it."""
    layer = module.lora_magnitude_vector[adapter]
    weight_norm = layer.get_weight_norm
    try:
        with other_norm(layer, lambda *args, **kwargs: weight_norm(*args, **kwargs).clamp_min(EPS)):
            yield
    finally:
        forget(module)


@contextmanager
def other_norm(layer: Any, norm: Any) -> Iterator[None]:
    """PEFT's code with another norm. Dynamo, which may trace a merge or a fallback, sets nothing where it also sees a ``del``,
    and then deletes it: hence the dict."""
    layer.get_weight_norm = norm
    try:
        yield
    finally:
        layer.__dict__.pop("get_weight_norm", None)


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
