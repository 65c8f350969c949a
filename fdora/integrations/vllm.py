"""vLLM serves DoRA adapters beside LoRA adapters: a plug-in that it finds by itself. For vLLM 0.30 to 0.33.

    pip install path/to/fdora          # a clone, into the environment of vLLM
    vllm serve MODEL --enable-lora --lora-modules law=path/to/adapter

On a GPU one pass takes the place of vLLM's expand, ``y = g[slot of the token] * (z + h B^T - bias) + bias`` of its base product
and shrink, in place; elsewhere a pass comes behind it. g = m / ||W + s B A|| is computed when an adapter is loaded, and kept.
Tokens of LoRA adapters and of none have what vLLM gives them, bit for bit.
What cannot be served is refused when the adapter is loaded. ``VLLM_PLUGINS`` without fdora in it leaves vLLM alone.
"""

from __future__ import annotations

import logging
from functools import wraps
from importlib import import_module
from inspect import getattr_static, signature
from typing import Any

from fdora._check import fail
from fdora.integrations._vllm import adapter, slots

__all__ = ["obstacle", "register", "unregister"]

FN = adapter.FN
# what is replaced -> by what, and the parameters that it must have; and what is called
PARTS = {
    "config.lora:LoRAConfig.compute_hash": (adapter.compute_hash, "self"),
    "lora.peft_helper:PEFTHelper._validate_features": (adapter.validate_features, "self"),
    "lora.lora_model:parse_fine_tuned_lora_name": (adapter.parse, "name weights_mapper"),
    "lora.lora_model:LoRAModel.from_lora_tensors": (
        adapter.from_lora_tensors,
        "tensors peft_helper weights_mapper skip_prefixes",
    ),
    "lora.lora_weights:PackedLoRALayerWeights.pack": (adapter.pack, "loras"),
    "lora.worker_manager:WorkerLoRAManager._load_adapter": (adapter.load_adapter, "self lora_request"),
    "lora.model_manager:LoRAModelManager.register_module": (slots.register_module, "self module_name module"),
    "lora.model_manager:LoRAModelManager.activate_adapter": (slots.activate_adapter, "self lora_id"),
    "lora.model_manager:LoRAModelManager._deactivate_adapter": (slots.deactivate_adapter, "self lora_id"),
}
CALLED = {
    "lora.model_manager:LoRAModelManager._get_lora_layer_weights": "self lora_model module_name",
    "lora.lora_model:LoRAModel._should_skip_module": "module_name skip_prefixes",
    "lora.layers.base_linear:BaseLinearLayerWithLoRA.apply": "self x bias",
    "lora.layers.base_linear:BaseLinearLayerWithLoRA.set_lora": "self index lora_a lora_b",
    "lora.layers.base_linear:BaseLinearLayerWithLoRA.set_mapping": "self punica_wrapper",
    "lora.punica_wrapper.punica_base:PunicaWrapperBase.add_shrink": "self y x lora_a_stacked scale",
    "lora.punica_wrapper.punica_base:PunicaWrapperBase.token_lora_indices": "self",
    "model_executor.layers.linear:UnquantizedLinearMethod.apply": "self layer x bias",
    "distributed:tensor_model_parallel_all_reduce": "input_",
}
_stock: list[tuple[Any, str, Any]] = []  # whose attribute was what


def register() -> None:
    """vLLM takes DoRA adapters from now on, in this process: its entry point. Idempotent.

    A vLLM that is put together in another way than the ones this file knows is left as it is, with one sentence in its log.
    """
    if _stock:
        return
    wrong = obstacle()
    if wrong:
        logging.getLogger("vllm.fdora").warning(wrong)
        return
    for part, (instead, _) in PARTS.items():
        owner, name, found = _find(part)
        _stock.append((owner, name, found))
        setattr(owner, name, _around(found, instead))


def unregister() -> None:
    """Undo :func:`register`. Engines made meanwhile keep serving."""
    while _stock:
        setattr(*_stock.pop())


def obstacle() -> str:
    """Why this vLLM cannot be made to serve DoRA, in one sentence; empty where it can. Imports vLLM."""
    for part, wanted in ({part: wanted for part, (_, wanted) in PARTS.items()} | CALLED).items():
        try:
            found: Any = _find(part)[2]
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            missing = [name for name in wanted.split() if name not in signature(found).parameters]
        except (ImportError, AttributeError, TypeError) as error:
            missing = [f"{type(error).__name__}: {error}"]
        if missing:
            remedy = "Use a vLLM from 0.30 to 0.33; DoRA adapters are refused by this one."
            want = f"a function of {', '.join(wanted.split())}"
            return str(fail(FN, f"vllm.{part.replace(':', '.')}", want, f"one that lacks {', '.join(missing)}", remedy))
    return ""


def _find(part: str) -> tuple[Any, str, Any]:
    """Whose attribute it is, its name, and what is there, not bound."""
    module, _, path = part.partition(":")
    owner = import_module(f"vllm.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name, getattr_static(owner, name)


def _around(found: Any, instead: Any) -> Any:
    plain = getattr(found, "__func__", found)

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(plain, *args, **kwargs)

    return classmethod(call) if isinstance(found, classmethod) else call
