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

from fdora.functional import dora_linear, select_backend
from fdora.integrations._norm import PLAIN
from fdora.integrations._peft.dora import FUSED, Dora, Weights, caching, forget, served
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
        if shared is not None and not torch.compiler.is_compiling():
            y = shared.output(self, x)
            if y is not None:
                return y
        call = call_of(self, x, *found)
        if call is None:
            return lora.Linear.forward(self, x)
        w, c = call.weights, call.counted_norm()
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

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The weight may be elsewhere now, or another: ``model.to``."""
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
    if module.disable_adapters or module.merged:
        return None
    adapters = module._modules["lora_A"]._modules
    names = [name for name in module.active_adapters if name in adapters]
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
    if type(x) not in PLAIN:
        return f"the input is a {type(x).__name__}", None
    if module.training and not isinstance(dropout, nn.Identity) and not draws(dropout, x):
        return "dropout with torch's mask", None
    W, bias = base.weight, base.bias
    A, B, m = lora_A.weight, lora_B.weight, magnitude.weight
    device = W.device
    for t in (W, A, B, m):
        if type(t) not in PLAIN or t.device != device:
            return "sharded parameters, or on several devices", None
    if x.device != device or device.type == "meta":
        return "the input is on another device, or meta tensors", None
    if module.fan_in_fan_out:
        return "a transposed base weight", None
    w = caching(magnitude) or served(W, W, A, B, m)
    if isinstance(w, str):
        return w, None
    if not torch.is_autocast_enabled(device.type):
        if x.dtype != W.dtype:
            return f"a {x.dtype} input for a {W.dtype} base weight", None
        if bias is not None and x.dtype == torch.float32 and select_backend(x).name == "eager":
            return "float32 with a bias, eager: the base layer's own sum keeps a fresh adapter an exact no-op", None
    return w, bias


def draws(dropout: nn.Module, x: Tensor) -> bool:
    """Whether kernels draw the mask: no dropped copy of x, no stored mask. Elsewhere PEFT's own module is the faster way."""
    return type(dropout) is nn.Dropout and dropout.p < 1 and not hooked(dropout) and select_backend(x).name == "triton"


def hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    d = module.__dict__
    return bool(
        d["_forward_hooks"] or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"] or "forward" in d
    )


def fuse_layer(module: Any) -> None:
    module.__class__ = OURS.get(type(module), type(module))


def unfuse_layer(module: Any) -> None:
    module.__class__ = {ours: stock for stock, ours in OURS.items()}.get(type(module), type(module))


OURS: dict[type, Any] = {lora.Linear: Linear, torchao.TorchaoLoraLinear: TorchaoLoraLinear}
