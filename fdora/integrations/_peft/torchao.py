"""Merging into a torchao weight. PEFT's own merge there adds s B A and leaves the magnitude out.

It dequantises W, adds ``get_delta_weight`` and quantises again; to unmerge it subtracts. So for the time of either that delta
is ``g (W + s B A) - W``, and what takes it back.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import torchao as lora
from torch import Tensor

from fdora.functional import dora_merge, dora_norm, dora_unmerge
from fdora.integrations._peft.dora import Dora
from fdora.quant import QuantWeight


class Merging(lora.TorchaoLoraLinear):
    """PEFT's layer, which merges W' of the magnitude as well."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        self._during(merged_minus, super().merge, *args, **kwargs)

    def unmerge(self) -> None:
        self._during(minus_unmerged, super().unmerge)

    def _during(self, delta: Any, run: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["get_delta_weight"] = lambda adapter: delta(self, adapter)
        try:
            run(*args, **kwargs)
        finally:
            del self.__dict__["get_delta_weight"]


def merged_minus(module: Any, adapter: str) -> Tensor:
    w = factors(module, adapter)
    if w is None:
        return lora.TorchaoLoraLinear.get_delta_weight(module, adapter)
    W, A, B, m, s, dtype = w
    c = dora_norm(W, A, B, s=s)
    module._cache_store(f"{adapter}-weight_norm", c)
    return (dora_merge(W, A, B, m, s=s, norm=c) - W).to(dtype)


def minus_unmerged(module: Any, adapter: str) -> Tensor:
    w = factors(module, adapter)
    if w is None:
        return lora.TorchaoLoraLinear.get_delta_weight(module, adapter)
    W, A, B, m, s, dtype = w
    return (W - dora_unmerge(W, A, B, m, s=s, norm=module._cache_pop(f"{adapter}-weight_norm"))).to(dtype)


def factors(module: Any, adapter: str) -> tuple[Any, ...] | None:
    """W, A, B and m in float32, s, and the dtype of W; None for an adapter without a magnitude."""
    variant = module.lora_variant.get(adapter)
    if not isinstance(variant, Dora):
        return None
    w = variant.weights(module, adapter)
    why = w if isinstance(w, str) else "another adapter is merged already" if module.merged_adapters else ""
    if isinstance(w, str) or why:
        raise NotImplementedError(f"fdora: a DoRA adapter cannot be merged into this torchao weight: {why}. Merge it alone.")
    W: Any = w.W.dequantize(torch.float32) if isinstance(w.W, QuantWeight) else w.W.detach().float()
    dtype = module.get_base_layer().weight.dtype
    return W, *(t.detach().float() for t in (w.A, w.B, w.m)), float(module.scaling[adapter]), dtype
