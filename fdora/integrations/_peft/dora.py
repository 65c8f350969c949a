"""What every kind of layer shares: the norm that is reused, the counters, the way back, and what cannot be served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import dora
from torch import Tensor

from fdora._plain import Route
from fdora._torch import PLAIN, is_traced, jit_tracing
from fdora.functional import select_backend
from fdora.functional.prepared import attached
from fdora.integrations._norm import KeptNorm
from fdora.integrations._peft.quant import Held, look
from fdora.quant import QuantWeight

EPS = 1e-12  # dora_scale's floor of c
FUSED, COMPOSED = "fused", "composed"  # the layer in one call; the base layer, then its correction


class Weights:
    """Views in nn.Linear's layout: W (N, K), A (r, K), B (N, r), m (N,). owner is the tensor that W was made from."""

    __slots__ = ("A", "B", "W", "m", "owner")

    def __init__(self, owner: Any, W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor):
        self.owner, self.W, self.A, self.B, self.m = owner, W, A, B, m


class Dora:
    """Goes into ``layer.lora_variant[adapter]`` in the place of PEFT's, which it keeps and falls back to.

    It carries a norm and counters, so one object belongs to one adapter of one layer. A copy or a pickle starts without them.
    """

    STOCK: type

    def __init__(self, stock: Any = None):
        self.stock = self.STOCK() if stock is None else stock
        self.keep_inner = False
        self.detach = True
        self.shared: Any = None  # with the layers that read the same x, see blocks.py
        self.place = 0  # among these
        self.tail: Any = None  # what may follow the layer in its call, see ends.py
        self.calls: Counter[str] = Counter()
        self.why_not_fused = ""
        self.kept = KeptNorm()
        self.route: Route | None = None  # how its last call was found out, see steady.py
        self.held = Held()
        self.base = "", ""  # what quant.py said of the base layer when use_fdora looked

    def __getstate__(self) -> dict[str, Any]:
        return {"stock": self.stock, "keep_inner": self.keep_inner, "detach": self.detach, "base": self.base}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stock"])  # type: ignore[misc]
        self.keep_inner, self.base = state["keep_inner"], state["base"]
        self.detach = state.get("detach", True)  # a pickle of before

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

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        """The layer's output, from that of its base layer."""
        raise NotImplementedError

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        w = self.ready(module, active_adapter)
        if isinstance(w, str):
            return self.fall_back(w, module, active_adapter, x, result, **kwargs)
        self.count(COMPOSED)
        return self.compose(module, active_adapter, w, x, result)

    def fall_back(self, why: str, module: Any, adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        self.count(f"stock: {why}")
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


def obstacle(*tensors: Any) -> str:
    """Why fdora's functions cannot take these parameters; empty where they can."""
    opaque = is_traced()  # no storage to ask for
    device = tensors[0].device
    if isinstance(tensors[0], QuantWeight):
        tensors = (*[t for t in tensors[0].tensors if t is not None], *tensors[1:])
    for t in tensors:
        if type(t) not in PLAIN:
            return f"a {type(t).__name__} among the parameters"
        if t.device != device:
            return "parameters on several devices"
        if not opaque and device.type != "meta" and t.untyped_storage().size() == 0:
            return "parameters without storage (sharded)"
    return "meta tensors" if device.type == "meta" else ""


def served(owner: Any, W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor) -> Weights | str:
    """The weights, if they are what dora_linear wants. Sharded ones come as pieces, of any shape."""
    why = dtypes(W, A, B, m)
    if why:
        return why
    if not (len(W.shape) == A.dim() == B.dim() == 2) or (m.shape, A.shape, B.shape) != (
        (W.shape[0],),
        (B.shape[1], W.shape[1]),
        (W.shape[0], A.shape[0]),
    ):
        return "parameters of other shapes (sharded)"
    return Weights(owner, W, A, B, m)


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


def dtypes(W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor) -> str:
    """The same for what dora_linear asks of its weights beside that."""
    if W.requires_grad:
        return "the base weight requires grad"
    if not isinstance(W, QuantWeight) and (not W.is_floating_point() or W.element_size() == 1):
        return f"a {W.dtype} base weight"
    for t in (A, B, m):
        if t.dtype not in (torch.float32, W.dtype):
            return f"a {t.dtype} adapter on a {W.dtype} base weight"
    return ""


def reused(module: Any) -> bool:
    """Whether every merge passes through a variant. A plain LoRA adapter beside ours changes the base weight on its own."""
    return len(module.lora_variant) == len(module.scaling)
