"""What every kind of layer shares: the norm that is reused, the counters, the way back, and what cannot be served."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fdora.functional import NormState, dora_norm, dora_norm_state

PLAIN = (Tensor, nn.Parameter)
EPS = 1e-12  # dora_scale's floor of c
COMPOSED, FUSED = "composed", "fused"


class Weights:
    """Views in nn.Linear's layout: W (N, K), A (r, K), B (N, r), m (N,). owner is the parameter that W was made from."""

    __slots__ = ("A", "B", "W", "m", "owner")

    def __init__(self, owner: Any, W: Tensor, A: Tensor, B: Tensor, m: Tensor):
        self.owner, self.W, self.A, self.B, self.m = owner, W, A, B, m


class Dora:
    """Shared by all kinds of layers: the norm that is reused, the counters, the way back."""

    STOCK: type
    weights: Callable[[Any, str], Weights | str]  # of one adapter of a module, or why fdora cannot serve it

    def __init__(self, stock: Any = None):
        self.stock = self.STOCK() if stock is None else stock
        self.keep_inner = False
        self.calls: Counter[str] = Counter()
        self.why_not_fused = ""
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts to count and to remember anew."""
        return {"stock": self.stock, "keep_inner": self.keep_inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stock"])  # type: ignore[misc]
        self.keep_inner = state["keep_inner"]

    def forget(self) -> None:
        """The base weight may have changed: the next norm is computed."""
        self._state: NormState | None = None
        self._of: tuple[Any, ...] = ()

    def count(self, path: str) -> None:
        if not torch.compiler.is_compiling():
            self.calls[path] += 1

    def norm(self, w: Weights, s: float) -> Tensor:
        """c (N,), computed again only when the bits of A, B or s changed. Traced and mapped code computes it every time."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return dora_norm(w.W, w.A, w.B, s=s)
        of = (id(w.owner), w.W.dtype, w.W.device, w.W.shape, torch.is_inference_mode_enabled())
        state = self._state
        if state is None or self._of[1:] != of or self._of[0]() is not w.owner:
            state = dora_norm_state(w.W)
            self._of = (weakref.ref(w.owner), *of)
        new = dora_norm(w.W, w.A, w.B, s=s, state=state)
        if w.W.is_cuda and torch.cuda.is_current_stream_capturing():
            for old, now in zip(state, new, strict=True):  # a replay reads and writes the memory from before the capture
                old.copy_(now)
            new = NormState(new.c, state.fingerprint)
            self._state = state
        else:
            self._state = new
        return new.c

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
        with merging(module, active_adapter):
            return self.stock.unmerge(module, active_adapter, orig_weight)


def forget(module: Any) -> None:
    for variant in module.lora_variant.values():
        if isinstance(variant, Dora):
            variant.forget()


@contextmanager
def merging(module: Any, adapter: str) -> Iterator[None]:
    """The base weight changes: no norm of before holds. Rows of zeros get dora_scale's g, not 0 / 0."""
    layer = module.lora_magnitude_vector[adapter]
    layer.get_weight_norm = lambda *args, **kwargs: type(layer).get_weight_norm(layer, *args, **kwargs).clamp_min(EPS)
    try:
        yield
    finally:
        del layer.get_weight_norm
        forget(module)


def obstacle(*tensors: Any) -> str:
    """Why fdora's functions cannot take these parameters; empty where they can."""
    traced = torch.compiler.is_compiling()
    device = tensors[0].device
    for t in tensors:
        if type(t) not in PLAIN:
            return f"a {type(t).__name__} among the parameters"
        if t.device != device:
            return "parameters on several devices"
        if not traced and t.numel() and not t.is_meta and t.untyped_storage().size() == 0:
            return "parameters without storage (sharded)"
    return "meta tensors" if device.type == "meta" else ""


def dtypes(W: Tensor, A: Tensor, B: Tensor, m: Tensor) -> str:
    if not W.is_floating_point() or W.requires_grad:
        return "the base weight requires grad" if W.requires_grad else f"a {W.dtype} base weight"
    allowed = (torch.float32, W.dtype)
    return "" if all(t.dtype in allowed for t in (A, B, m)) else "adapters neither in float32 nor in the base weight's dtype"


def reused(module: Any) -> bool:
    """Whether every merge passes through us. A plain LoRA adapter beside ours merges on its own."""
    return len(module.lora_variant) == len(module.scaling)
