"""A whole DoRA layer in one call of :func:`fdora.functional.dora_linear`, instead of the base layer and then a correction.

The layer's class is exchanged for a subclass, and back: nothing is added to the instance, so deepcopy, pickle, DataParallel
and torch.compile see an ordinary module. What the one call does not serve runs PEFT's forward, and so our variant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.lora import torchao
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora._dispatch import forced
from fdora._facts import facts
from fdora._records import Operands
from fdora._torch import PLAIN, in_subgraph, is_traced
from fdora.functional import dora_linear, select_backend
from fdora.functional.linear import checked_linear
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import FUSED, Dora, Weights, forget, paused, release, reused, served
from fdora.integrations._peft.torchao import TorchaoLoraLinear


class Linear(lora.Linear):
    """PEFT's ``lora.Linear``, same name, same parameters, with the short way first."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            return lora.Linear.forward(self, x, *args, **kwargs)  # not super(): bound methods outlive unfuse_layer
        found = active(self)
        if found is None:
            return lora.Linear.forward(self, x)
        shared = found[1].shared
        if shared is not None and not (torch.compiler.is_dynamo_compiling() and in_subgraph()):
            y = shared.output(self, x)
            if y is not None:
                return y
        call = call_of(self, x, *found)
        if call is None:
            return lora.Linear.forward(self, x)
        w, c = call.weights, call.counted_norm()
        fits = x.dtype == w.W.dtype and x.shape[-1:] == w.W.shape[1:]
        if fits and call.p == 0 and c.dtype == torch.float32:
            # _verdict has looked at all else that dora_linear checks
            layer = Operands(w.W, w.A, w.B, w.m, c, call.bias, None)
            name = select_backend(x).name
            if not torch.is_autocast_enabled(x.device.type):
                return checked_linear(x, layer, call.s, 0.0, "lora", call.variant.keep_inner, name)
        return dora_linear(
            x, w.W, w.A, w.B, w.m, s=call.s, bias=call.bias, norm=c, dropout_p=call.p, dropout_mode="peft",
            keep_inner=call.variant.keep_inner,
        )  # fmt: skip

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """The base weight will not come back bit for bit, whichever adapter it was."""
        super().merge(*args, **kwargs)
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


class Call(NamedTuple):
    """What one call of dora_linear takes."""

    variant: Dora
    weights: Weights
    bias: Tensor | None
    s: float
    p: float

    def counted_norm(self) -> Tensor:
        self.variant.count(FUSED)
        return self.variant.norm(self.weights, self.s)


def active(module: Any) -> tuple[str, Dora] | None:
    """The one adapter that is active, and its variant; None where PEFT's forward has to run."""
    if module._disable_adapters or module.merged_adapters:
        return None
    adapters, named = module._modules["lora_A"]._modules, module._active_adapter
    names = [name for name in ((named,) if type(named) is str else named) if name in adapters]
    variant = module.lora_variant.get(names[0]) if len(names) == 1 else None
    if not isinstance(variant, Dora):
        for name in names:
            note(module.lora_variant.get(name), "several active adapters")
        return None
    return names[0], variant


def call_of(module: Any, x: Tensor, name: str, variant: Dora) -> Call | None:
    """The one call, or None where PEFT's forward has to run."""
    dropout = module._modules["lora_dropout"]._modules[name]
    p = dropout.p if module.training and type(dropout) is nn.Dropout and dropout.training else 0.0
    w, bias = plan(module, name, dropout, x)
    if isinstance(w, str):
        note(variant, w)
        return None
    return Call(variant, w, bias, module.scaling[name], p)


def note(variant: Any, why: str) -> None:
    if isinstance(variant, Dora) and not torch.compiler.is_compiling():
        variant.why_not_fused = why


def plan(module: Any, name: str, dropout: nn.Module, x: Tensor) -> tuple[Weights | str, Tensor | None]:
    """The tensors of the one call, and the bias; or why it is not made."""
    parts = module._modules  # an attribute of a module costs ten times a look into its dict
    base, lora_A, lora_B, magnitude = (
        parts["base_layer"],
        parts["lora_A"]._modules[name],
        parts["lora_B"]._modules[name],
        parts["lora_magnitude_vector"]._modules[name],
    )
    for part in (base, lora_A, lora_B):
        if type(part) is not nn.Linear:  # a quantised layer, a wrapper that shards
            return f"a {type(part).__name__} in the place of a torch.nn.Linear", None
        if hooked(part):
            return "hooks on the layer's parts", None
    if type(magnitude) is not DoraLinearLayer or hooked(magnitude):
        return "hooks on the layer's parts", None
    if module.training and type(dropout) is not nn.Identity and not draws(dropout, x):
        return "dropout with torch's mask", None
    if module.fan_in_fan_out:
        return "a transposed base weight", None
    why = paused(magnitude, module.scaling[name])
    if why:
        return why, None
    W, A, B, m = [part._parameters.get("weight") for part in (base, lora_A, lora_B, magnitude)]
    bias = base._parameters.get("bias")
    if W is None or A is None or B is None or m is None:  # FSDP1 holds views of its flat parameter in their places
        W, A, B, m, bias = base.weight, lora_A.weight, lora_B.weight, magnitude.weight, base.bias
    why = _verdict(x, W, A, B, m, bias)
    return why or Weights(W, W, A, B, m), bias


_verdicts: dict[tuple, str] = {}
MAX_VERDICTS = 8192


def _verdict(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, bias: Tensor | None) -> str:
    """Why dora_linear cannot take these tensors; empty where it can. Remembered by all that it looks at."""
    if is_traced():
        return _refusal(x, W, A, B, m, bias)
    found = None if W.is_meta else facts((x, W, A, B, m, bias))
    if found is None:
        return _refusal(x, W, A, B, m, bias)
    key = (found, W.requires_grad, torch.is_autocast_enabled(W.device.type), forced())
    why = _verdicts.get(key)
    if why is None:
        if len(_verdicts) >= MAX_VERDICTS:
            _verdicts.clear()
        why = _verdicts[key] = _refusal(x, W, A, B, m, bias)
    return why


def _refusal(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, bias: Tensor | None) -> str:
    if type(x) not in PLAIN:
        return f"the input is a {type(x).__name__}"
    device = W.device
    for t in (W, A, B, m):
        if type(t) not in PLAIN or t.device != device:
            return "sharded parameters, or on several devices"
    if x.device != device or device.type == "meta":
        return "the input is on another device, or meta tensors"
    w = served(W, W, A, B, m)
    if isinstance(w, str):
        return w
    if not torch.is_autocast_enabled(device.type):
        if x.dtype != W.dtype:
            return f"a {x.dtype} input for a {W.dtype} base weight"
        if bias is not None and x.dtype == torch.float32 and select_backend(x).name == "eager":
            return "float32 with a bias, eager: the base layer's own sum keeps a fresh adapter an exact no-op"
    return ""


def draws(dropout: nn.Module, x: Tensor) -> bool:
    """Whether kernels draw the mask: no dropped copy of x, no stored mask. Elsewhere PEFT's own module is the faster way."""
    return type(dropout) is nn.Dropout and dropout.p < 1 and not hooked(dropout) and select_backend(x).name == "triton"


def fuse_layer(module: Any) -> None:
    module.__class__ = OURS.get(type(module), type(module))


def unfuse_layer(module: Any) -> None:
    module.__class__ = {ours: stock for stock, ours in OURS.items()}.get(type(module), type(module))


def norms_of(model: nn.Module | None) -> list[tuple[Any, Tensor, Tensor, Tensor, float]]:
    """The layers of a model whose norms its hook can compute together: KeptNorm, W, A, B and s of each."""
    found: list[tuple[Any, Tensor, Tensor, Tensor, float]] = []
    layers: Any = () if model is None else model.modules()
    for layer in layers:
        pair = active(layer) if type(layer) is Linear and reused(layer) and not layer.fan_in_fan_out else None
        if pair is None or type(layer._modules["base_layer"]) is not nn.Linear:
            continue
        name, variant = pair
        w, s = variant.weights(layer, name), layer.scaling[name]
        if (
            isinstance(w, str)
            or isinstance(s, Tensor)
            or any(t.is_inference() for t in (w.W, w.A, w.B))
            or select_backend(w.W).name != "triton"
        ):
            continue
        found.append((variant.kept, w.W, w.A, w.B, s))
    return found


OURS: dict[type, Any] = {lora.Linear: Linear, torchao.TorchaoLoraLinear: TorchaoLoraLinear}
