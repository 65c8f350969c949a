"""A small engine of the shape of vLLM's LoRA code, where vLLM is not installed: written for these tests, names and protocol alone are
vLLM's. ``stand_in()`` puts it into sys.modules; processes of a tensor-parallel group are threads."""

import json
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear


class LoRAConfig:
    fully_sharded_loras = False

    def compute_hash(self):
        return "of the config"


class PEFTHelper:
    def __init__(self, path):
        config = json.loads((path / "adapter_config.json").read_text())
        self.r, self.use_dora, self.s = config["r"], config.get("use_dora", False), config["lora_alpha"] / config["r"]

    def get_rank_and_scaling(self, module_name):
        return self.r, self.s

    def _validate_features(self):
        return ["DoRA is not supported."] if self.use_dora else []


def parse_fine_tuned_lora_name(name, weights_mapper=None):
    *layer, part, end = name.removeprefix("base_model.model.").split(".")
    if part not in ("lora_A", "lora_B") or end != "weight":
        raise ValueError(f"{name} is unsupported")
    return ".".join(layer), part == "lora_A"


class LoRALayerWeights:
    def __init__(self, scaling):
        self.lora_a = self.lora_b = None
        self.scaling = scaling

    def optimize(self):
        self.lora_b, self.scaling = self.lora_b * self.scaling, 1


class PackedLoRALayerWeights(LoRALayerWeights):
    @classmethod
    def pack(cls, loras):
        packed = cls(1)
        for each in loras:
            if each:
                each.optimize()
        packed.lora_a, packed.lora_b = ([getattr(each, part, None) for each in loras] for part in ("lora_a", "lora_b"))
        return packed

    def optimize(self):
        pass


class LoRAModel:
    def __init__(self, id, loras):
        self.id, self.loras = id, loras

    @staticmethod
    def _should_skip_module(module_name, skip_prefixes):
        return any(f".{prefix}" in module_name for prefix in skip_prefixes)

    @classmethod
    def from_lora_tensors(cls, lora_model_id, tensors, peft_helper, dtype=None, weights_mapper=None, skip_prefixes=None):
        loras = {}
        for key, t in tensors.items():
            name, is_a = sys.modules["vllm.lora.lora_model"].parse_fine_tuned_lora_name(key, weights_mapper)
            weights = loras.setdefault(name, LoRALayerWeights(peft_helper.get_rank_and_scaling(name)[1]))
            setattr(weights, "lora_a" if is_a else "lora_b", t.to(dtype))
        return cls(lora_model_id, loras)


class UnquantizedLinearMethod:
    def apply(self, layer, x, bias=None):
        return linear(x, layer.weight, bias)


class Codes:
    """int8 codes with a scale for each row; with ``step`` x is rounded to whole steps of at most 127."""

    def __init__(self, W, step=None):
        self.scale = W.abs().amax(1, keepdim=True) / 127
        self.codes, self.step = (W / self.scale).round(), step

    @property
    def W(self):
        return self.codes * self.scale

    def apply(self, layer, x, bias=None):
        if self.step:
            x = (x / self.step).round().clamp(-128, 127) * self.step
        return linear(x, self.W.to(x.dtype), bias)


class Base(nn.Module):
    """This process's part of a layer of ``sizes`` rows, cut along ``axis`` of W; None is all of it."""

    def __init__(self, weights, axis=None, bias=None, rank=0, size=1, method=None):
        super().__init__()
        self.output_sizes, self.input_size = [len(W) for W in weights], weights[0].shape[1]
        self.output_size, self.tp_rank, self.tp_size = sum(self.output_sizes), rank, size
        mine = [W if axis is None else W.chunk(size, axis)[rank] for W in weights]
        self.slices, self.weight = [len(W) for W in mine], torch.cat(mine)
        self.quant_method, self.params_dtype = method or UnquantizedLinearMethod(), self.weight.dtype
        self.bias = (
            bias if bias is None or axis != 0 else torch.cat([b.chunk(size)[rank] for b in bias.split(self.output_sizes)])
        )
        self.skip_bias_add, self.return_bias, self.reduce_results = False, True, True
        if method:
            self.input_scale = None if method.step is None else torch.tensor(method.step)
            self.weight = self.weight.to(torch.int8)


class BaseLinearLayerWithLoRA(nn.Module):
    def __init__(self, base_layer, slots, r, dtype, packed):
        super().__init__()
        self.base_layer, self.lora_config = base_layer, LoRAConfig()
        self.tp_size, self.tp_rank, self.packed = base_layer.tp_size, base_layer.tp_rank, packed
        sizes = base_layer.slices if packed else [sum(base_layer.slices)]
        self.lora_a_stacked = tuple(torch.zeros(slots, 1, r, base_layer.weight.shape[1], dtype=dtype) for _ in sizes)
        self.lora_b_stacked = tuple(torch.zeros(slots, 1, n, r, dtype=dtype) for n in sizes)

    def set_mapping(self, punica_wrapper):
        self.punica_wrapper = punica_wrapper

    def slice_lora_a(self, a):
        return a

    def slice_lora_b(self, b):
        return b

    def reset_lora(self, index):
        for t in (*self.lora_a_stacked, *self.lora_b_stacked):
            t[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self.reset_lora(index)
        pairs = zip(lora_a, lora_b, strict=True) if self.packed else [(lora_a, lora_b)]
        for i, (a, b) in enumerate(pairs):
            if a is not None:
                a, b = self.slice_lora_a(a), self.slice_lora_b(b)
                self.lora_a_stacked[i][index, 0, : a.shape[0], : a.shape[1]].copy_(a)
                self.lora_b_stacked[i][index, 0, : b.shape[0], : b.shape[1]].copy_(b)

    def apply(self, x, bias=None):
        y = self.base_layer.quant_method.apply(self.base_layer, x, bias)
        self.punica_wrapper.add_lora_linear(
            y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self.lora_a_stacked, self.lora_b_stacked, 1.0, (y.shape[-1],)
        )
        return y

    def forward(self, input_):
        return self.apply(input_, self.base_layer.bias), None


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def slice_lora_b(self, b):
        return b.chunk(self.tp_size)[self.tp_rank]


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    def apply(self, x, bias=None):
        return super().apply(x, self.base_layer.bias)


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def slice_lora_a(self, a):
        width = self.lora_a_stacked[0].shape[-1]
        return a[:, self.tp_rank * width : (self.tp_rank + 1) * width]

    def forward(self, input_):
        y = self.apply(input_, self.base_layer.bias if self.tp_rank == 0 else None)
        return (tensor_model_parallel_all_reduce(y) if self.tp_size > 1 else y), None


class VocabParallelEmbeddingWithLoRA(nn.Module):
    pass


class PunicaWrapperBase:
    def __init__(self, tokens):
        self._token_lora_indices = torch.full((tokens,), 99)
        tables = ("token_indices_sorted_by_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "active_lora_ids")
        self.token_mapping_meta = SimpleNamespace(
            **dict.fromkeys(tables, torch.zeros(0)), no_lora_flag_cpu=torch.tensor([False])
        )
        self.count = 0

    @property
    def token_lora_indices(self):
        return self._token_lora_indices[: self.count]

    def add_shrink(self, y, x, lora_a_stacked, scale):
        for h, A in zip(y, lora_a_stacked, strict=True):
            for t, slot in enumerate(self.token_lora_indices.tolist()):
                h[t] = scale * linear(x[t], A[slot, 0]) if slot >= 0 else torch.nan

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices):
        first = 0
        for A, B in zip(lora_a_stacked, lora_b_stacked, strict=True):
            for t, slot in enumerate(self.token_lora_indices.tolist()):
                if slot >= 0:
                    y[t, first : first + B.shape[2]] += linear(linear(x[t], A[slot, 0]), B[slot, 0])
            first += B.shape[2]


class LoRAModelManager:
    def __init__(self, layers, packed, slots=3, r=4, dtype=torch.float32):
        self.model, self.modules, self.packed_modules, self.lora_index_to_id = nn.Module(), {}, packed, [None] * slots
        self.registered, self.wrapper = {}, PunicaWrapperBase(64)
        for name, (cls, base) in layers.items():
            module = cls(base, slots, r, dtype, name in packed) if base else cls()
            self.register_module(name, module)
            if base:
                module.set_mapping(self.wrapper)

    def register_module(self, module_name, module):
        self.modules[module_name] = module

    def _get_lora_layer_weights(self, lora_model, module_name):
        return lora_model.loras.get(module_name)

    def get_adapter(self, adapter_id):
        return self.registered.get(adapter_id)

    def add_adapter(self, model):
        for name, parts in self.packed_modules.items():
            found = [model.loras.pop(part, None) for part in parts]
            if any(found):
                model.loras[name] = PackedLoRALayerWeights.pack(found)
        for weights in model.loras.values():
            weights.optimize()
        self.registered[model.id] = model

    def activate_adapter(self, lora_id):
        if lora_id in self.lora_index_to_id:
            return False
        slot = self.lora_index_to_id.index(None)
        self.lora_index_to_id[slot] = lora_id
        for name, module in self.modules.items():
            weights = self._get_lora_layer_weights(self.registered[lora_id], name)
            if weights:
                module.set_lora(slot, weights.lora_a, weights.lora_b)
            elif hasattr(module, "reset_lora"):
                module.reset_lora(slot)
        return True

    def _deactivate_adapter(self, lora_id):
        if lora_id in self.lora_index_to_id:
            self.lora_index_to_id[self.lora_index_to_id.index(lora_id)] = None

    def remove_adapter(self, lora_id):
        self._deactivate_adapter(lora_id)
        self.registered.pop(lora_id, None)

    def run(self, name, x, ids):
        """A layer, for tokens of these adapters; 0 is none."""
        self.wrapper.count = len(ids)
        self.wrapper._token_lora_indices[: len(ids)] = torch.tensor([self.lora_index_to_id.index(i) if i else -1 for i in ids])
        return self.modules[name](x)[0]


class WorkerLoRAManager:
    def __init__(self, manager, dtype=torch.float32):
        self._adapter_manager, self.dtype = manager, dtype

    def _load_adapter(self, lora_request):
        helper = PEFTHelper(lora_request.path)
        wrong = helper._validate_features()
        if wrong:
            raise ValueError(*wrong)
        tensors = load_file(lora_request.path / "adapter_model.safetensors")
        return LoRAModel.from_lora_tensors(lora_request.id, tensors, helper, dtype=self.dtype)

    def add_adapter(self, path, id):
        model = self._load_adapter(SimpleNamespace(path=path, id=id, lora_path=str(path)))
        self._adapter_manager.add_adapter(model)
        self._adapter_manager.activate_adapter(id)


group = SimpleNamespace(rank=threading.local(), barrier=None, parts=None)


def tensor_model_parallel_all_reduce(input_):
    group.parts[group.rank.value] = input_
    group.barrier.wait()
    total = sum(group.parts)
    group.barrier.wait()
    return total


def in_parallel(size, work):
    """``work(rank)`` in a thread each; what they return."""
    group.barrier, group.parts, found = threading.Barrier(size), [None] * size, [None] * size

    def run(rank):
        group.rank.value = rank
        try:
            found[rank] = work(rank)
        except BaseException:
            group.barrier.abort()  # the others would wait
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    return found


PLACES = {
    "config.lora": [LoRAConfig],
    "lora.peft_helper": [PEFTHelper],
    "lora.lora_model": [LoRAModel, parse_fine_tuned_lora_name],
    "lora.lora_weights": [LoRALayerWeights, PackedLoRALayerWeights],
    "lora.worker_manager": [WorkerLoRAManager],
    "lora.model_manager": [LoRAModelManager],
    "lora.layers.base_linear": [BaseLinearLayerWithLoRA],
    "lora.layers.column_parallel_linear": [ColumnParallelLinearWithLoRA],
    "lora.layers.row_parallel_linear": [RowParallelLinearWithLoRA],
    "lora.layers.replicated_linear": [ReplicatedLinearWithLoRA],
    "lora.layers.vocab_parallel_embedding": [VocabParallelEmbeddingWithLoRA],
    "lora.punica_wrapper.punica_base": [PunicaWrapperBase],
    "model_executor.layers.linear": [UnquantizedLinearMethod],
    "distributed": [tensor_model_parallel_all_reduce],
    "platforms": [],
}


@contextmanager
def stand_in():
    """In the place of vLLM, whether it is installed or not."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    for place, found in PLACES.items():
        names = ["vllm", *place.split(".")]
        for i in range(1, len(names) + 1):
            sys.modules.setdefault(".".join(names[:i]), ModuleType(".".join(names[:i])))
        for each in found:
            setattr(sys.modules[f"vllm.{place}"], each.__name__, each)
            each.__module__ = f"vllm.{place}"
    sys.modules["vllm.platforms"].current_platform = SimpleNamespace(can_update_inplace=lambda: True)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)
