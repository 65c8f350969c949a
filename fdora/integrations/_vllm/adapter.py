"""Reading an adapter: the magnitudes go with the weights of their layers, and what cannot be served is refused."""

from __future__ import annotations

import copy
import json
import re
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from fdora import __version__
from fdora._check import fail

FN = "integrations.vllm"
MERGE = "Merge the adapter into a copy of the model, or train it without this layer."
MAGNITUDE = re.compile(r"\.lora_magnitude_vector(\.weight)?$")


def compute_hash(stock: Any, self: Any) -> str:
    """Compiled code that was kept without this file lacks its pass."""
    return f"{stock(self)} fdora {__version__}"


def validate_features(stock: Any, self: Any) -> Any:
    plain = copy.copy(self)
    plain.use_dora = False
    return stock(plain)


def parse(stock: Any, name: str, weights_mapper: Any = None) -> Any:
    """A magnitude has the name that B would have in its place."""
    return stock(MAGNITUDE.sub(".lora_B.weight", name), weights_mapper)


def from_lora_tensors(stock: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The magnitudes go with the weights of their layers, as an attribute m, in float32."""
    given = signature(stock).bind(cls, *args, **kwargs)
    tensors, helper = given.arguments["tensors"], given.arguments["peft_helper"]
    mapper, skipped = (given.arguments.get(name) for name in ("weights_mapper", "skip_prefixes"))
    given.arguments["tensors"] = {key: t for key, t in tensors.items() if not MAGNITUDE.search(key)}
    magnitudes = {
        layer_of(key, mapper): t
        for key, t in tensors.items()
        if MAGNITUDE.search(key) and not (skipped and cls._should_skip_module(key, skipped))
    }
    if magnitudes and not helper.use_dora:
        raise fail(FN, "use_dora", "true beside magnitudes", "false", "Write what PEFT had into adapter_config.json.")
    model = stock(*given.args, **given.kwargs)
    if not helper.use_dora:
        return model
    for name in dict.fromkeys([*model.loras, *magnitudes]):
        weights: Any = model.loras.get(name)
        A, B = (getattr(weights, part, None) for part in ("lora_a", "lora_b"))
        parts: dict[str, Any] = {"A": A, "B": B, "m": magnitudes.get(name)}
        missing = [label for label, t in parts.items() if t is None]
        if missing:
            raise fail(FN, name, "a layer with A, B and m", f"none of {', '.join(missing)}", "Save the adapter again.")
        A, B, m = parts.values()
        weights.m = m.detach().float().flatten()
        if A.dim() == B.dim() == 2 and (A.shape[0] != B.shape[1] or B.shape[0] != len(weights.m)):
            have = f"{tuple(A.shape)}, {tuple(B.shape)}, {tuple(m.shape)}"
            raise fail(FN, name, "A (r, K), B (N, r) and m (N,)", have, "Save the adapter again.")
        if not all(bool(t.isfinite().all()) for t in (A, B, weights.m)):
            raise fail(
                FN, name, "an adapter of finite numbers", "NaN or inf", "Its training diverged: take another checkpoint."
            )
    return model


def layer_of(key: str, mapper: Any) -> str:
    return str(import_module("vllm.lora.lora_model").parse_fine_tuned_lora_name(key, mapper)[0])


def pack(stock: Any, cls: Any, loras: Any) -> Any:
    packed, m = stock(cls, loras), [getattr(each, "m", None) for each in loras]
    if any(t is not None for t in m):
        packed.m = m
    return packed


def load_adapter(stock: Any, self: Any, lora_request: Any) -> Any:
    """Refuses what could not be served, before there is anything of it in the engine."""
    model, manager, seen = stock(self, lora_request), self._adapter_manager, set()
    if not is_dora(model):
        return model
    if not hasattr(import_module("vllm.lora.peft_helper").PEFTHelper, "get_rank_and_scaling"):
        config = json.loads((Path(lora_request.lora_path) / "adapter_config.json").read_text())
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            raise fail(FN, "rank_pattern and alpha_pattern", "empty before vLLM 0.32", "patterns", "It would not heed them.")
    for full, module in manager.modules.items():
        packed = manager.packed_modules.get(full, [])
        for i, name in enumerate([full, *packed]):
            weights = manager._get_lora_layer_weights(model, name)
            if getattr(weights, "m", None) is None:
                continue
            seen.add(id(weights))
            check(name, module, i - 1, len(packed), weights)
    partial = any(type(each).__name__ == "PPMissingLayer" for each in manager.model.modules())
    for name, weights in model.loras.items():
        if id(weights) not in seen and not partial:
            raise fail(FN, name, "a linear layer that this server adapts", "none of that name", MERGE)
    return model


def is_dora(model: Any) -> bool:
    return any(getattr(weights, "m", None) is not None for weights in model.loras.values())


def check(name: str, module: Any, part: int, parts: int, weights: Any) -> None:
    """``part`` of a packed layer, of so many; -1: all of it."""
    if "g_stacked" not in module.__dict__:
        raise fail(FN, name, "a linear layer, LoRA of which vLLM cuts by rows alone", type(module).__name__, MERGE)
    base = module.base_layer
    for attribute in ("input_zero_point", "input_global_scale", "input_global_scale_inv"):
        if getattr(base, attribute, None) is not None:
            raise fail(FN, name, "a layer whose weight can be read", f"one with {attribute}", MERGE)
    sizes = list(getattr(base, "output_sizes", [base.output_size]))
    if hasattr(base, "total_num_kv_heads"):
        heads, head = base.total_num_kv_heads, base.head_size
        sizes = [base.total_num_heads * head, heads * head, heads * getattr(base, "v_head_size", head)]
    N = sum(sizes) if part < 0 else sizes[part] if len(sizes) == parts else len(weights.m)
    have = weights.lora_b.shape[0], weights.lora_a.shape[1]
    if have != (N, base.input_size):
        raise fail(FN, name, f"an adapter of a weight {(N, base.input_size)}", have, "It belongs to another base model.")
