"""A whole DoRA layer in one call of :func:`fdora.functional.dora_linear`, instead of base layer, then correction.

The layer's class is exchanged for a subclass, and back: nothing is added to the instance, so deepcopy, pickle, DataParallel
and torch.compile see an ordinary module. Whatever the one call does not serve runs PEFT's forward, and so our variant.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from fdora.functional import dora_linear, select_backend
from fdora.integrations._peft.dora import FUSED, Dora, Weights, forget


class Linear(lora.Linear):
    """PEFT's ``lora.Linear``, same name, same parameters, with the short way first."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        names = [name for name in self.active_adapters if name in self.lora_A]
        variant = self.lora_variant.get(names[0]) if len(names) == 1 else None
        if not isinstance(variant, Dora):
            for name in names:
                note(self.lora_variant.get(name), "several active adapters")
            return super().forward(x)
        name = names[0]
        w = plan(self, variant, name, x)
        if isinstance(w, str):
            note(variant, w)
            return super().forward(x)
        variant.count(FUSED)
        s, dropout = self.scaling[name], self.lora_dropout[name]
        p = dropout.p if self.training and dropout.training and type(dropout) is nn.Dropout else 0.0
        c = variant.norm(w, s)
        bias = self.base_layer.bias
        return dora_linear(
            x, w.W, w.A, w.B, w.m, s=s, bias=bias, norm=c, dropout_p=p, dropout_mode="peft", keep_inner=variant.keep_inner
        )

    def merge(self, *args: Any, **kwargs: Any) -> None:
        super().merge(*args, **kwargs)
        forget(self)

    def unmerge(self) -> None:
        super().unmerge()
        forget(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        forget(self)


def note(variant: Any, why: str) -> None:
    if isinstance(variant, Dora) and not torch.compiler.is_compiling():
        variant.why_not_fused = why


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def plan(module: Any, variant: Dora, name: str, x: Tensor) -> Weights | str:
    """The tensors of the one call, or why it is not made."""
    base = module.base_layer
    for part, what in ((base, "base layer"), (module.lora_A[name], "lora_A"), (module.lora_B[name], "lora_B")):
        if type(part) is not nn.Linear:
            return f"the {what} is a {type(part).__name__}"
        if hooked(part):
            return f"the {what} has hooks"
    if type(x) not in (Tensor, nn.Parameter):
        return f"the input is a {type(x).__name__}"
    dropout = module.lora_dropout[name]
    dropped = module.training and not isinstance(dropout, nn.Identity)
    if dropped and (type(dropout) is not nn.Dropout or select_backend(x).name != "triton"):
        return "dropout"
    if module.lora_B[name].bias is not None:
        return "lora_bias"
    w = variant.weights(module, name)
    if isinstance(w, str):
        return w
    if x.device != w.W.device:
        return "the input is on another device"
    if x.dtype != w.W.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"a {x.dtype} input for a {w.W.dtype} base weight"
    return w


def fuse(module: Any) -> None:
    if type(module) is lora.Linear:
        module.__class__ = Linear


def unfuse(module: Any) -> None:
    if type(module) is Linear:
        module.__class__ = lora.Linear
