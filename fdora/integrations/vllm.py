"""vLLM serves DoRA adapters beside LoRA adapters: a plug-in that it finds by itself. For vLLM 0.30 to 0.33.

    pip install path/to/fdora          # a clone, into the environment of vLLM
    vllm serve MODEL --enable-lora --lora-modules law=path/to/adapter

On a GPU one pass takes the place of vLLM's expand, ``y = g[slot of the token] * (z + h B^T - bias) + bias`` of its base product
and shrink, in place; elsewhere a pass comes behind it. g = m / ||W + s B A|| is computed when an adapter is loaded, and kept.
Tokens of LoRA adapters and of none have what vLLM gives them, bit for bit.
What cannot be served is refused when the adapter is loaded. ``VLLM_PLUGINS`` without fdora in it leaves vLLM alone.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator
from functools import cache, wraps
from importlib import import_module
from inspect import getattr_static, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fdora import __version__
from fdora._check import fail
from fdora.functional import dora_norm, dora_scale, select_backend
from fdora.functional.opaque import scale_slots

__all__ = ["obstacle", "register", "unregister"]

FN = "integrations.vllm"
MERGE = "Merge the adapter into a copy of the model, or train it without this layer."
MAGNITUDE = re.compile(r"\.lora_magnitude_vector(\.weight)?$")
LINEAR = ("column_parallel_linear", "row_parallel_linear", "replicated_linear")
ROWS = 512  # unit rows in one product
LENGTHS = (1, 2, 16, 65, 80, 513, 528)  # tokens: each compiles the pass anew, where the server has ranks for it
UNIT = 64.0  # in steps of a quantised activation: float8 and int8 hold it

TABLES = ("token_indices_sorted_by_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "active_lora_ids")

# what is replaced -> the parameters that it must have; and what is called
PARTS = {
    "config.lora:LoRAConfig.compute_hash": "self",
    "lora.peft_helper:PEFTHelper._validate_features": "self",
    "lora.lora_model:parse_fine_tuned_lora_name": "name weights_mapper",
    "lora.lora_model:LoRAModel.from_lora_tensors": "tensors peft_helper weights_mapper skip_prefixes",
    "lora.lora_weights:PackedLoRALayerWeights.pack": "loras",
    "lora.worker_manager:WorkerLoRAManager._load_adapter": "self lora_request",
    "lora.model_manager:LoRAModelManager.register_module": "self module_name module",
    "lora.model_manager:LoRAModelManager.activate_adapter": "self lora_id",
    "lora.model_manager:LoRAModelManager._deactivate_adapter": "self lora_id",
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
    for part, instead in zip(PARTS, INSTEAD, strict=True):
        owner, name, found = _find(part)
        _stock.append((owner, name, found))
        setattr(owner, name, _around(found, instead))


def unregister() -> None:
    """Undo :func:`register`. Engines made meanwhile keep serving."""
    while _stock:
        setattr(*_stock.pop())


def obstacle() -> str:
    """Why this vLLM cannot be made to serve DoRA, in one sentence; empty where it can. Imports vLLM."""
    for part, wanted in (PARTS | CALLED).items():
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


# Reading an adapter


def _compute_hash(stock: Any, self: Any) -> str:
    """Compiled code that was kept without this file lacks its pass."""
    return f"{stock(self)} fdora {__version__}"


def _validate_features(stock: Any, self: Any) -> Any:
    plain = copy.copy(self)
    plain.use_dora = False
    return stock(plain)


def _parse(stock: Any, name: str, weights_mapper: Any = None) -> Any:
    """A magnitude has the name that B would have in its place."""
    return stock(MAGNITUDE.sub(".lora_B.weight", name), weights_mapper)


def _from_lora_tensors(stock: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The magnitudes go with the weights of their layers, as an attribute m, in float32."""
    given = signature(stock).bind(cls, *args, **kwargs)
    tensors, helper = given.arguments["tensors"], given.arguments["peft_helper"]
    mapper, skipped = (given.arguments.get(name) for name in ("weights_mapper", "skip_prefixes"))
    given.arguments["tensors"] = {key: t for key, t in tensors.items() if not MAGNITUDE.search(key)}
    magnitudes = {
        _layer_of(key, mapper): t
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


def _layer_of(key: str, mapper: Any) -> str:
    return str(import_module("vllm.lora.lora_model").parse_fine_tuned_lora_name(key, mapper)[0])


def _pack(stock: Any, cls: Any, loras: Any) -> Any:
    packed, m = stock(cls, loras), [getattr(each, "m", None) for each in loras]
    if any(t is not None for t in m):
        packed.m = m
    return packed


def _load_adapter(stock: Any, self: Any, lora_request: Any) -> Any:
    """Refuses what could not be served, before there is anything of it in the engine."""
    model, manager, seen = stock(self, lora_request), self._adapter_manager, set()
    if not _is_dora(model):
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
            _check(name, module, i - 1, len(packed), weights)
    partial = any(type(each).__name__ == "PPMissingLayer" for each in manager.model.modules())
    for name, weights in model.loras.items():
        if id(weights) not in seen and not partial:
            raise fail(FN, name, "a linear layer that this server adapts", "none of that name", MERGE)
    return model


def _is_dora(model: Any) -> bool:
    return any(getattr(weights, "m", None) is not None for weights in model.loras.values())


def _check(name: str, module: Any, part: int, parts: int, weights: Any) -> None:
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


# Slots


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


def _register_module(stock: Any, self: Any, module_name: str, module: Any) -> None:
    """Every linear layer gets its buffer of g before anything is compiled or captured: which adapters come is not known."""
    stock(self, module_name, module)
    home, _, file = type(module).__module__.rpartition(".")
    sharded = getattr(getattr(module, "lora_config", None), "fully_sharded_loras", False)
    in_place = import_module("vllm.platforms").current_platform.can_update_inplace()
    if home != "vllm.lora.layers" or file not in LINEAR or (sharded and module.tp_size > 1) or not in_place:
        return
    B = module.lora_b_stacked
    if not hasattr(self, "fdora_slots"):
        self.fdora_slots = Slots(len(B[0]), B[0].device)
    module.g_stacked = torch.ones(len(B[0]), sum(each.shape[2] for each in B), device=B[0].device)
    module.slots_hold, module.slots_idle = self.fdora_slots.holds, self.fdora_slots.idle
    module.low = [] if sharded or getattr(module, "_enable_aux_cuda_stream", False) else low_of(module)
    kind: Any = type(module)
    module.__class__ = served(kind)
    none = torch.full((len(B[0]) + 1,), -1, dtype=torch.int32, device=B[0].device)
    for M in LENGTHS if module.low else ():  # compiles the kernel: a capture must not
        z, h = B[0].new_zeros(M, module.g_stacked.shape[1]), none.new_zeros(len(B), M, B[0].shape[3], dtype=torch.float32)
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
def _activate_adapter(stock: Any, self: Any, lora_id: int) -> bool:
    """vLLM's own A and B are in the slot when g is computed: it is that of what is served. An error leaves nothing behind."""
    model = self.get_adapter(lora_id)
    dora = model is not None and _is_dora(model)
    try:
        fresh = stock(self, lora_id)
        if fresh and hasattr(self, "fdora_slots"):
            slot = self.lora_index_to_id.index(lora_id)
            if dora:
                _fill(self, model, slot)
            self.fdora_slots.set(slot, dora)
    except Exception:
        if dora:
            self.remove_adapter(lora_id)
        raise
    return bool(fresh)


def _deactivate_adapter(stock: Any, self: Any, lora_id: int) -> None:
    stock(self, lora_id)
    for slot, who in enumerate(self.lora_index_to_id):
        if who is None and hasattr(self, "fdora_slots"):
            self.fdora_slots.set(slot, False)


def _fill(manager: Any, model: Any, slot: int) -> None:
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


def g_of(module: Any, slot: int, m: Any) -> Tensor:
    """``m / ||W + B A||`` of this process's rows, A and B as the slot has them (s is in B); 1 where a part has no m."""
    As, Bs = ([t[slot, 0] for t in stacked] for stacked in (module.lora_a_stacked, module.lora_b_stacked))
    ends = torch.tensor([0, *(len(B) for B in Bs)]).cumsum(0).tolist()
    squares = torch.zeros(ends[-1], device=Bs[0].device)
    for columns, W in parts_of(module):
        for i, (A, B) in enumerate(zip(As, Bs, strict=True)):
            rows = slice(ends[i], ends[i + 1])
            factors = [t if t.dtype == W.dtype else t.float() for t in (A[:, columns], B)]
            squares[rows] += dora_norm(W[rows], *factors, s=1.0, squared=True)
    if module.tp_size > 1 and type(module).over_columns:
        squares = import_module("vllm.distributed").tensor_model_parallel_all_reduce(squares)
    cut, given = torch.cat(own_part(module, m)).unbind(1)
    return torch.where(given > 0, dora_scale(cut, squares.sqrt()), 1)


def parts_of(module: Any) -> Iterator[tuple[slice, Tensor]]:
    """Columns of W, (N, columns) each. Of a quantised weight, in any format, unit rows times W^T through vLLM's product."""
    base, (N, K) = module.base_layer, (module.g_stacked.shape[1], module.lora_a_stacked[0].shape[-1])
    plain = import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    W = getattr(base, "weight", None)
    if isinstance(base.quant_method, plain) and W is not None and tuple(W.shape) == (N, K):
        yield slice(0, K), W.detach().as_subclass(Tensor)
        return
    step = getattr(base, "input_scale", None)
    unit = 1.0 if step is None else UNIT * float(step.max())
    dtype = getattr(base, "params_dtype", module.lora_a_stacked[0].dtype)
    for k in range(0, K, ROWS):
        x = torch.zeros(min(ROWS, K - k), K, dtype=dtype, device=module.g_stacked.device)
        x.diagonal(k).fill_(unit)
        yield slice(k, k + len(x)), (base.quant_method.apply(base, x, None).float() / unit).T


def own_part(module: Any, m: Any) -> list[Tensor]:
    """Of the magnitudes of whole layers those of this process, beside a 1 where there is one: (rows, 2) for each part.

    vLLM's own code cuts them: they are set as a B of two columns, in buffers that are there for that long.
    """
    kept = module.lora_a_stacked, module.lora_b_stacked
    device = kept[1][0].device
    module.lora_a_stacked = tuple([torch.zeros(1, 1, 1, A.shape[-1], device=device) for A in kept[0]])
    module.lora_b_stacked = tuple([torch.zeros(1, 1, B.shape[2], 2, device=device) for B in kept[1]])
    as_B = [None if t is None else torch.stack((t, torch.ones_like(t)), 1) for t in (m if isinstance(m, list) else [m])]
    as_A = [None if t is None else torch.zeros(1, 1) for t in as_B]
    try:
        module.set_lora(0, *((as_A, as_B) if isinstance(m, list) else (as_A[0], as_B[0])))
        return [B[0, 0] for B in module.lora_b_stacked]
    finally:
        module.lora_a_stacked, module.lora_b_stacked = kept


INSTEAD = (
    *(_compute_hash, _validate_features, _parse, _from_lora_tensors, _pack, _load_adapter),
    *(_register_module, _activate_adapter, _deactivate_adapter),
)  # in the order of PARTS
