"""torchtune's DoRA through fdora's functions: one line to go, one line to come back. For torchtune 0.6.1.

    use_fdora(model)     # after the builder; restore(model) is the way back

torchtune's layer is ``y = g * (x W^T + bias + s D(x) A^T B^T)``: g scales the bias, dropout is on the adapter's input alone.
That is dora_linear with ``bias=g * bias``, through which the bias's part of dm comes by the chain rule. Parameters, state-dict
keys, ``disabled`` and ``adapter_params`` stay torchtune's. The layer's class is exchanged for a subclass, and back.
"""

from __future__ import annotations

from fdora.integrations._framework import need

need("torchtune", "torchtune", "0.6.1")
need("torchtune", "torchao", "0.9")  # which torchtune leaves out of its requirements

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor, linear_nf4
from torchtune.modules.peft import DoRALinear

from fdora import FdoraError
from fdora._torch import PLAIN
from fdora.functional import dora_compose, dora_linear, dora_scale, select_backend
from fdora.integrations._hook import hook, hooked, unhook
from fdora.integrations._norm import KeptNorm
from fdora.quant import QuantWeight, from_torchao

__all__ = ["FdoraLinear", "report", "restore", "use_fdora"]
Model = TypeVar("Model", bound=nn.Module)


def use_fdora(model: Model) -> Model:
    """Run the DoRA layers of this model through fdora. In place and idempotent; nothing enters the state dict.

    Call it again after you change a frozen weight in place: norms are then computed anew. (Adapters may change as they like,
    and load_state_dict and moving the model are noticed.)

    Raises:
      FdoraError: there is no DoRALinear in it.
    """
    layers = [m for m in model.modules() if type(m) in (DoRALinear, FdoraLinear)]
    if not layers:
        remedy = "Build it with use_dora=True, and call this before the layers themselves are sharded or wrapped."
        raise FdoraError(f"fdora.use_fdora: `model` must have a DoRALinear of torchtune, got none. {remedy}")
    unhook(model)
    kepts: list[KeptNorm] = []
    for layer in layers:
        layer.__class__ = FdoraLinear
        kepts.append(layer.__dict__.setdefault("_fdora", _Run()).kept)
        kepts[-1].make_room(layer.weight)
        kepts[-1].base = kepts[-1].layer = weakref.ref(layer)
    if not isinstance(model, DoRALinear):
        hook(model, [model], kepts, _norms_of)
    return model


def restore(model: Model) -> Model:
    """Undo :func:`use_fdora`: every layer runs torchtune's own code again, but for those sharded one by one since."""
    unhook(model)
    for layer in model.modules():
        if type(layer) is FdoraLinear:
            layer.__class__ = DoRALinear
            del layer.__dict__["_fdora"]
    return model


def report(model: nn.Module) -> dict[str, dict[str, int]]:
    """``{layer: {path: calls}}``: "fused" is one call of dora_linear, "composed" torchtune's products and dora_compose,
    "stock: why" torchtune's own code. A layer that use_fdora has not seen is empty. Compiled calls are not counted."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, DoRALinear)}
    return {name: dict(m._fdora.calls) if isinstance(m, FdoraLinear) else {} for name, m in layers.items()}


class _Run:
    """Counters and the norm of one layer. A copy or a pickle of the layer starts without them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.kept = KeptNorm()
        self.held: tuple[Any, QuantWeight] | None = None

    def weight(self, W: NF4Tensor) -> QuantWeight:
        """Of the same tensor it is the same."""
        if torch.compiler.is_compiling():
            return from_torchao(W)
        if self.held is None or self.held[0] is not W:
            with torch.inference_mode(False):
                self.held = W, from_torchao(W)
        return self.held[1]

    def forget(self) -> None:
        self.held = None
        self.kept.forget()

    def __reduce__(self) -> tuple[type[_Run], tuple[()]]:
        return _Run, ()

    def count(self, path: str) -> None:
        if not torch.compiler.is_compiling():
            self.calls[path] += 1


class FdoraLinear(DoRALinear):
    """torchtune's DoRALinear, same parameters, computed by fdora. Made by :func:`use_fdora` only."""

    _fdora: _Run

    def forward(self, x: Tensor) -> Tensor:
        if self.disabled:
            return super().forward(x)
        if why := _obstacle(self, x):
            self._fdora.count(f"stock: {why}")
            return super().forward(x)
        A, B, m, s = self.lora_a.weight, self.lora_b.weight, self.magnitude, self.scaling
        nf4 = isinstance(self.weight, NF4Tensor)
        W: Any = self._fdora.weight(self.weight) if nf4 else self.weight
        c = self._fdora.kept.of(W.tensors[0] if nf4 else W, W, A, B, s)
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) and self.dropout.training else 0.0
        called = _does_more(self.lora_a) or _does_more(self.lora_b)
        if not called and (p == 0 or (p < 1 and select_backend(x).name == "triton")):
            self._fdora.count("fused")
            bias = None if self.bias is None else dora_scale(m, c) * self.bias
            return dora_linear(x, W, A, B, m, s=s, bias=bias, norm=c, dropout_p=p)
        self._fdora.count("composed")  # so is dropout in plain torch, with torchtune's own mask
        base = linear_nf4(input=x, weight=self.weight) if nf4 else F.linear(x, W, self.bias)
        base = base + self.bias if nf4 and self.bias is not None else base
        return dora_compose(base, self.lora_b(self.lora_a(self.dropout(x))), dora_scale(m, c), s=s)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if torch.__future__.get_swap_module_params_on_conversion():
            self._fdora.kept.make_room(None)
        self._fdora.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fdora.held = None
        self._fdora.kept.make_room(None)  # torch.utils.swap_tensors refuses a tensor that somebody refers to weakly
        super()._apply(*args, **kwargs)
        self._fdora.kept.make_room(self.weight)
        return self


def _obstacle(layer: FdoraLinear, x: Tensor) -> str:
    """Why fdora's functions cannot take this layer; empty where they can."""
    W, A, B, m = layer.weight, layer.lora_a.weight, layer.lora_b.weight, layer.magnitude
    for t in (A, B, m, x) if isinstance(W, NF4Tensor) else (W, A, B, m, x):
        if type(t) not in PLAIN:
            return f"a {type(t).__name__} among the tensors"
        if t.device != W.device or t.is_meta:
            return "tensors on several devices, or on meta"
    if A.shape != (A.shape[0], W.shape[1]) or B.shape != (W.shape[0], A.shape[0]) or m.shape != (W.shape[0],):
        return "parameters of other shapes (sharded)"
    if W.requires_grad and torch.is_grad_enabled():
        return "the base weight requires grad"
    if any(t.dtype not in (torch.float32, W.dtype) for t in (A, B, m)):
        return f"adapters neither float32 nor {W.dtype}"
    if x.dtype != W.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"a {x.dtype} input for a {W.dtype} base weight"
    return "" if type(layer.dropout) in (nn.Identity, nn.Dropout) else f"a {type(layer.dropout).__name__} for dropout"


def _norms_of(layers: Iterable[Any]) -> list[tuple[KeptNorm, Tensor, Tensor, Tensor, float]]:
    """Those of these modules whose norms can be computed together."""
    found = []
    for layer in layers:
        if type(layer) is not FdoraLinear or layer.disabled or isinstance(layer.weight, NF4Tensor):
            continue
        W, A, B = layer.weight, layer.lora_a.weight, layer.lora_b.weight
        if _obstacle(layer, W) or any(t.is_inference() for t in (W, A, B)) or select_backend(W).name != "triton":
            continue
        found.append((layer._fdora.kept, W, A, B, layer.scaling))
    return found


def _does_more(m: nn.Module) -> bool:
    """Whether calling a part of the layer does more than its weight says."""
    return type(m) is not nn.Linear or hooked(m)
