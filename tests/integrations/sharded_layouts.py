"""The ways to shard a PEFT model that test_sharded.py looks at, and how full parameters and gradients are read back from each."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Block

PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def ddp(model, mesh):
    return DistributedDataParallel(model)


def fsdp2(model, mesh, units=(Block,), leaves=False, checkpoint=False, **options):
    """``units`` are sharded each by itself, ``leaves`` too: A, B and m of each layer, as Axolotl and LLaMA-Factory v1 do."""
    if checkpoint:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for module in list(model.modules()):
        if leaves and isinstance(module, LoraLayer):
            for part in PARTS:
                fully_shard(getattr(module, part)["default"], mesh=mesh, **options)
    for module in model.modules():
        if isinstance(module, units):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hsdp(model, mesh):
    sizes = (2, mesh.size() // 2)
    return fsdp2(model, dist.init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicas", "shards")))


def fsdp1(model, mesh, leaves=False, orig=False):
    blocks = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    policy = fsdp_auto_wrap_policy(model) if leaves else blocks
    return FSDP1(model, auto_wrap_policy=policy, use_orig_params=orig, device_id=next(model.parameters()).device)


LAYOUTS = {
    "ddp": ddp,
    "fsdp2 blocks": fsdp2,
    "fsdp2 blocks, kept gathered": partial(fsdp2, reshard_after_forward=False),
    "fsdp2 blocks, checkpointed": partial(fsdp2, checkpoint=True),
    "fsdp2 blocks, offloaded": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 layers": partial(fsdp2, units=(LoraLayer,)),
    "hsdp blocks": hsdp,
    "fsdp2 root": partial(fsdp2, units=()),
    "fsdp2 leaves": partial(fsdp2, leaves=True),
    "fsdp2 leaves, checkpointed": partial(fsdp2, leaves=True, checkpoint=True),
    "fsdp1 leaves": partial(fsdp1, leaves=True),
    "fsdp1 leaves, original parameters": partial(fsdp1, leaves=True, orig=True),
    "fsdp1 blocks, original parameters": partial(fsdp1, orig=True),
}


def parallelize(model, mesh):
    """As for plain LoRA: B of what is cut along rows, A of what is cut along columns, cut with it."""
    for block in model.get_base_model().model.layers:
        plan = {}
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan |= {f"{path}.base_layer": ColwiseParallel(), f"{path}.lora_B.default": ColwiseParallel()}
        for path in ("self_attn.o_proj", "mlp.down_proj"):
            plan |= {f"{path}.base_layer": RowwiseParallel(), f"{path}.lora_A.default": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp_over_tp(model, mesh):
    """Two dimensions, of which two processes can fill one."""
    sizes = (max(1, mesh.size() // 2), 2)
    both = dist.init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("dp", "tp"))
    return fsdp2(parallelize(model, both["tp"]), both["dp"])


def plain_name(name):
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.").replace("_flat_param", "weight")


def gradients(run, like):
    """The full gradient of each adapter parameter, on every rank: the average over the ranks. ``like`` has the full shapes."""
    return _read(run, like, "grad")


def adapters(run, like):
    return _read(run, like, "data")


def _read(run, like, what):
    flat = {}
    if isinstance(run, FSDP1) and any("_flat_param" in name for name, _ in run.named_parameters()):
        for name, p in run.named_parameters():  # leaves: one parameter to a unit, the ranks' pieces behind each other
            name = plain_name(name)
            if p.requires_grad:
                piece, shape = getattr(p, what), like[name].shape
                every = piece.new_empty(piece.numel() * dist.get_world_size())
                dist.all_gather_into_tensor(every, piece.detach())
                flat[name] = every[: shape.numel()].view(shape).clone()
        return flat
    gathered = FSDP1.summon_full_params(run, with_grads=True) if isinstance(run, FSDP1) else nullcontext()
    with gathered:
        for name, p in run.named_parameters():
            if plain_name(name) in like:
                t = getattr(p, what)
                flat[plain_name(name)] = (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
    return flat
