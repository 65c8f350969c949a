"""One way's model, laid out over the processes of bench.sharded: FSDP2, tensor parallelism, or DeepSpeed's ZeRO."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from bench.clock import synchronize
from bench.decoder import context, nothing_dropped
from bench.model import Trained

ZERO = {"zero2": 2, "zero3": 3}
LAYOUTS = ("fsdp", "tp", "rows", "columns", *ZERO)
ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
COLUMNS = ("self_attn.o_proj", "mlp.down_proj")


def shard(model, blocks, mesh) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def parallelize(blocks, mesh, layout: str) -> None:
    """The base layer, and of the adapter what is cut with it, as plain LoRA is run. ``rows`` or ``columns``: these alone,
    between activations that every process has whole."""
    alone = layout != "tp"
    rows = ColwiseParallel(**({"output_layouts": Replicate()} if alone else {}))
    columns = RowwiseParallel(**({"input_layouts": Replicate()} if alone else {}))
    for block in blocks:
        plan = {}
        if layout != "columns":
            plan |= {f"{path}.{part}": rows for path in ROWS for part in ("base_layer", "lora_B.default")}
        if layout != "rows":
            plan |= {f"{path}.{part}": columns for path in COLUMNS for part in ("base_layer", "lora_A.default")}
        parallelize_module(block, mesh, plan)


def engine(model, optimizer, stage: int, rank: int, world: int):
    """DeepSpeed's, which averages gradients, shards them (and in stage 3 all weights) and keeps adapters in float32."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # or it compiles its own sums in shared memory on a CPU: minutes
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config | {"zero_optimization": {"stage": stage}})[0]


class Sharded(Trained):
    """Its leaves are those of the layout: shards under FSDP2, parts and whole ones under tensor parallelism."""

    def __init__(self, way, base, values, inputs, options, mesh):
        how = {"dropout": options.dropout, "context": context(options.device, options.dtype, options.adapter)}
        super().__init__(way, base, values, inputs, min(options.loss_tokens, options.seq), **how)
        names = {id(p): name for name, p in self.leaves.items()}
        places = {name: names[id(p)] for name, p in self.model.named_parameters() if id(p) in names}
        blocks = self.model.get_base_model().get_decoder().layers
        self.stage = ZERO.get(options.layout)
        if options.layout != "fsdp" and not self.stage:
            parallelize(blocks, mesh, options.layout)
        if options.compiled:
            self.compile()
        if options.layout == "fsdp":
            shard(self.model, blocks, mesh)
        self.leaves = {places[name]: p for name, p in self.model.named_parameters() if name in places}
        spread = [isinstance(p, DTensor) for p in self.leaves.values()]
        groups = [[p for p, cut in zip(self.leaves.values(), spread, strict=True) if cut is kind] for kind in (False, True)]
        groups = [{"params": group} for group in groups if group]  # one fused update takes DTensors, or none
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=options.device == "cuda")
        if self.stage:
            self.model = engine(self.model, self.optimizer, self.stage, mesh.get_local_rank(), mesh.size())

    def backward(self, loss) -> None:
        self.model.backward(loss) if self.stage else loss.backward()

    def update(self) -> None:
        self.model.step() if self.stage else super().update()

    def gradient(self, p) -> torch.Tensor:
        if self.stage:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(p)
        return p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad

    def issue(self, device: str) -> list[float]:
        """ms in which the host issues each part of a step, from an empty queue."""
        dist.barrier()
        synchronize(device)
        times = [time.perf_counter()]
        loss = self.loss()
        times.append(time.perf_counter())
        self.backward(loss)
        times.append(time.perf_counter())
        self.update()
        times.append(time.perf_counter())
        synchronize(device)
        return [1e3 * (b - a) for a, b in pairwise(times)]

    def gradients_of_all(self) -> dict[str, torch.Tensor]:
        """The average over the ranks, of all A, all B, all m; and the loss."""
        with nothing_dropped(self.model):
            loss = self.loss()
            self.backward(loss)
        found = results(self.leaves, loss, self.gradient)
        if self.stage:
            self.update()  # the engine forgets its gradients in no other way
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return found


def truth(base, values, inputs, options) -> dict[str, torch.Tensor]:
    """PEFT's DoRA on whole weights, where it cannot be cut as the others are."""
    last, under = min(options.loss_tokens, options.seq), context(options.device, options.dtype, options.adapter)
    run = Trained("peft_dora", copy.deepcopy(base), values, inputs, last, context=under)
    with nothing_dropped(run.model):
        loss = run.loss()
        loss.backward()
    return results(run.leaves, loss, lambda p: p.grad)


def results(leaves, loss, gradient) -> dict[str, torch.Tensor]:
    found = {"loss": loss.detach().clone()}
    dist.all_reduce(found["loss"])
    for part in "ABm":
        found[f"d{part}"] = torch.cat([gradient(p).flatten() for name, p in leaves.items() if name[0] == part])
    return found


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(t is DTensor for t in types):
            return NotImplemented  # its own operations come again, on parts
        if op.namespace in ("c10d", "_c10d_functional") and "wait" not in op.__name__:
            self.counts[op.__name__.partition(".")[0].strip("_")] += 1
        return op(*args, **(kwargs or {}))
