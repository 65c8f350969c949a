"""Layers that serve adapters from slots: which slots hold DoRA, the pass, and g when a slot is filled."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fdora._check import fail
from fdora.functional import select_backend
from fdora.functional.opaque import scale_slots
from fdora.integrations._vllm.adapter import FN, is_dora
from fdora.integrations._vllm.g import g_of

LINEAR = ("column_parallel_linear", "row_parallel_linear", "replicated_linear")
LENGTHS = (1, 2, 16, 65, 80, 513, 528)  # tokens: each compiles the pass anew, where the server has ranks for it
TABLES = ("token_indices_sorted_by_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "active_lora_ids")


class Slots:
    """Which slots of an engine hold DoRA, as its layers are told."""

    def __init__(self, count: int, device: torch.device):
        self.kinds = [False] * count
        self.holds = torch.zeros(count, dtype=torch.int32, device=device)
        self.idle = torch.ones(1, dtype=torch.bool)

    def set(self, slot: int, dora: bool) -> None:
        if self.kinds[slot] != dora:
            self.kinds[slot] = dora
            self.holds[slot] = int(dora)
            self.idle.fill_(not any(self.kinds))


def register_module(stock: Any, self: Any, module_name: str, module: Any) -> None:
    """Every linear layer gets its buffer of g before anything is compiled or captured: which adapters come is not known."""
    stock(self, module_name, module)
    home, _, file = type(module).__module__.rpartition(".")
    sharded = getattr(getattr(module, "lora_config", None), "fully_sharded_loras", False)
    in_place = import_module("vllm.platforms").current_platform.can_update_inplace()
    if home != "vllm.lora.layers" or file not in LINEAR or (sharded and module.tp_size > 1) or not in_place:
        return
    B = module.lora_b_stacked
    first, slots, device = B[0], len(B[0]), B[0].device
    if not hasattr(self, "fdora_slots"):
        self.fdora_slots = Slots(slots, device)
    module.g_stacked = torch.ones(slots, sum(each.shape[2] for each in B), device=device)
    module.slots_hold, module.slots_idle = self.fdora_slots.holds, self.fdora_slots.idle
    module.low = [] if sharded or getattr(module, "_enable_aux_cuda_stream", False) else low_of(module)
    kind: Any = type(module)
    module.__class__ = served(kind)
    none = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
    for M in LENGTHS if module.low else ():  # compiles the kernel: a capture must not
        z, h = first.new_zeros(M, module.g_stacked.shape[1]), none.new_zeros(len(B), M, first.shape[3], dtype=torch.float32)
        for bias in (None, getattr(module.base_layer, "bias", None)):
            given = z, module.g_stacked, module.slots_hold, bias, none.new_zeros(M)
            scale_slots(*given, low=[h, *module.low], tables=[none] * 4, idle=module.slots_idle, no_lora=None)


def low_of(module: Any) -> list[Tensor]:
    """B of all parts, and where their columns begin and end: the pass then adds what vLLM's expand would. Nothing without
    kernels."""
    B, sizes = module.lora_b_stacked, [each.shape[2] for each in module.lora_b_stacked]
    if any(size % 16 for size in sizes) or select_backend(B[0]).name != "triton":
        return []
    whole = torch.cat([each[:, 0] for each in B], 1)
    module.lora_b_stacked = tuple([each[:, None] for each in whole.split(sizes, 1)])
    return [whole, torch.tensor([0, *sizes], device=whole.device).cumsum(0).int() // 16]


@cache
def served(layer: Any) -> Any:
    """A class of vLLM's layers, with the pass behind what it does. Of rows each process scales its part of the sum."""

    class Served(layer):
        over_columns = layer.__module__.endswith("row_parallel_linear")  # each process has some

        def set_mapping(self, punica_wrapper: Any) -> None:
            super().set_mapping(Expand(self, punica_wrapper) if self.low else punica_wrapper)

        def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            z = super().apply(x, bias)
            return z if self.low else scaled(self, self.punica_wrapper, z, bias, [])

    return Served


class Expand:
    """vLLM's shrink, and the pass in the place of its expand."""

    def __init__(self, layer: Any, tokens: Any):
        self.layer, self.tokens = layer, tokens

    def add_lora_linear(self, y: Tensor, x: Tensor, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, *_: Any) -> None:
        A, layer, base = lora_a_stacked, self.layer, self.layer.base_layer
        h = x.new_empty(len(A), x.shape[0], A[0].shape[2], dtype=torch.float32)
        self.tokens.add_shrink(h, x, A, scale)
        lacks = base.skip_bias_add or (layer.over_columns and layer.tp_rank > 0)
        scaled(layer, self.tokens, y, None if lacks else base.bias, [h, *layer.low])


def scaled(layer: Any, tokens: Any, z: Tensor, bias: Tensor | None, low: list[Tensor]) -> Tensor:
    """z itself, which has the bias in it, and vLLM's LoRA where ``low`` is empty."""
    rows, known = z.view(-1, z.shape[-1]), getattr(tokens, "token_mapping_meta", None)
    tables, no_lora = [getattr(known, name) for name in TABLES if low], getattr(known, "no_lora_flag_cpu", None)
    given = rows, layer.g_stacked, layer.slots_hold, bias, tokens._token_lora_indices[: rows.shape[0]]
    scale_slots(*given, low=low, tables=tables, idle=layer.slots_idle, no_lora=no_lora)
    return z


@torch.no_grad()
def activate_adapter(stock: Any, self: Any, lora_id: int) -> bool:
    """vLLM's own A and B are in the slot when g is computed: it is that of what is served. An error leaves nothing behind."""
    model = self.get_adapter(lora_id)
    dora = model is not None and is_dora(model)
    try:
        fresh = stock(self, lora_id)
        if fresh and hasattr(self, "fdora_slots"):
            slot = self.lora_index_to_id.index(lora_id)
            if dora:
                fill(self, model, slot)
            self.fdora_slots.set(slot, dora)
    except Exception:
        if dora:
            self.remove_adapter(lora_id)
        raise
    return bool(fresh)


def deactivate_adapter(stock: Any, self: Any, lora_id: int) -> None:
    stock(self, lora_id)
    for slot, who in enumerate(self.lora_index_to_id):
        if who is None and hasattr(self, "fdora_slots"):
            self.fdora_slots.set(slot, False)


def fill(manager: Any, model: Any, slot: int) -> None:
    """g of every layer. It is kept with the adapter: one that comes back into a slot costs a copy."""
    computed = {}
    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(model, name)
        if "g_stacked" not in module.__dict__:
            continue
        if getattr(weights, "m", None) is None:
            module.g_stacked[slot] = 1
            continue
        if getattr(weights, "g", None) is None:
            computed[name] = weights, g_of(module, slot, weights.m)
        module.g_stacked[slot].copy_(weights.g if name not in computed else computed[name][1])
    for name, (weights, g) in computed.items():
        weights.g = g.cpu()
        if not bool(weights.g.isfinite().all()):
            raise fail(FN, name, "finite on this base", "a g of NaN or inf", "The base weight or the adapter is broken.")
