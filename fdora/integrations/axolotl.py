"""Axolotl's DoRA through fdora's functions: one line under ``plugins:``. For Axolotl 0.18 and newer.

    adapter: lora                  # or qlora
    peft_use_dora: true
    plugins:
      - fdora.integrations.axolotl.FdoraPlugin
    fdora_dropout_mode: lora       # optional: lora_dropout of the adapter's input alone, see use_fdora

Once the model and its adapter are loaded the plugin calls :func:`use_fdora`, and after training it prints what ran. Axolotl's
``lora_{qkv,o,mlp,embedding}_kernel`` may be on. They bind a method to each attention, MLP and embedding that computes DoRA
from a norm which is cached on the version counters of A and B; fused and 8-bit optimizers do not move those. Where a layer has
a DoRA adapter these methods are set aside, and the layers are called one by one. Dropout is then PEFT's, as in Axolotl without
its kernels: a mask for each layer, none left out. What Axolotl patched in classes (its attention's forward) stays as it is.
"""

from __future__ import annotations

from fdora.integrations._framework import need, set_aside

need("axolotl", "axolotl", "0.18.0")

import types
from typing import Any, Literal, TypeVar

from axolotl.integrations.base import BasePlugin
from peft import PeftModel
from pydantic import BaseModel
from torch import Tensor, nn

from fdora.integrations import peft
from fdora.integrations._peft.dora import ours
from fdora.integrations.peft import report, restore

__all__ = ["FdoraArgs", "FdoraPlugin", "report", "restore", "use_fdora"]

Model = TypeVar("Model", bound=nn.Module)


class FdoraArgs(BaseModel):
    """What the plugin reads of the configuration."""

    fdora_dropout_mode: Literal["peft", "lora"] | None = None


class FdoraPlugin(BasePlugin):
    """Listed under ``plugins:`` as ``fdora.integrations.axolotl.FdoraPlugin``."""

    to_tell = False

    def get_input_args(self) -> str:
        return "fdora.integrations.axolotl.FdoraArgs"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        if cfg.adapter and not isinstance(model, PeftModel):
            return  # the reference model of preference training has no adapter
        use_fdora(model, dropout_mode=cfg.fdora_dropout_mode or "peft")
        self.to_tell = True

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        if self.to_tell:  # Axolotl calls this twice
            print(report(model))
        self.to_tell = False


def use_fdora(model: Model, *, dropout_mode: Literal["peft", "lora"] = "peft") -> Model:
    """:func:`fdora.integrations.peft.use_fdora`; it also takes Axolotl's kernels off layers with a DoRA adapter. Idempotent.

    Raises:
      FdoraError: there is no DoRA adapter in the model.
    """
    peft.use_fdora(model, dropout_mode=dropout_mode)
    for module in model.modules():
        for name, instead in _INSTEAD.items():
            method: Any = module.__dict__.get(name)
            if _is_kernel(method) and any(map(ours, (method.__self__, *method.__self__.children()))):
                set_aside(module, name, None if instead is None else types.MethodType(instead, module))
    return model


def _is_kernel(method: Any) -> bool:
    """Whether Axolotl bound one of its kernels. Its ``original_apply_*`` call the layers, as they should."""
    if not isinstance(method, types.MethodType):
        return False
    of = method.__func__
    return of.__module__ in _KERNELS and not of.__name__.startswith("original_")


def _qkv(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = self.q_proj(x), self.k_proj(x)
    return q, k, k if self.v_proj is None else self.v_proj(x)


def _o(self: Any, x: Tensor) -> Tensor:
    return self.o_proj(x)


_KERNELS = ("axolotl.kernels.lora", "axolotl.monkeypatch.lora_kernels")
# Axolotl's attention calls apply_qkv and apply_o; where the others are absent, it calls the layers.
_INSTEAD = {"apply_qkv": _qkv, "apply_o": _o, "apply_in_proj_fused": None, "apply_out_proj": None, "forward": None}
