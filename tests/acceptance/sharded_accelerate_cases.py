"""accelerate's own sharding in two processes on a CPU: what it makes of a PEFT model that fdora runs, and three steps of it.

`accelerate launch --use_fsdp --cpu` shards nothing, and says nothing: accelerate 1.15 looks at its FSDP plugin only where the
processes have accelerators (MULTI_GPU and its like), and trains under DDP. What it would do is one value, the kind of its state,
which these cases set on a CPU; `prepare`, `backward` and the optimizer are accelerate's own. With it FSDP1 wants a device without
index. On GPUs (``python -m tests.acceptance.sharded_frameworks --device cuda accelerate``) nothing is set.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import DistributedType
from torch.distributed.tensor import DTensor

from fdora.integrations.peft import report, use_fdora
from tests.distributed.world import run
from tests.integrations.sharded_cases import built
from tests.integrations.tiny import LAYERS

STEPS = 3
CUDA = os.environ.get("DEVICE") == "cuda"
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}


def batches():
    draw = torch.Generator().manual_seed(3)
    return torch.randint(3, 260, (STEPS, 2, 2, 12), generator=draw).to(here())


def here():
    return torch.device("cuda", dist.get_rank()) if CUDA else torch.device("cpu")


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def alone():
    """Losses of this process on its data, with gradients averaged by hand."""
    model, losses = use_fdora(built().to(here()), fuse=False), []
    optimizer = sgd(model)
    for ids in batches():
        loss = loss_of(model, ids[dist.get_rank()])
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def shards(**options):
    os.environ |= {
        "LOCAL_RANK": os.environ["RANK"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29612",
        "ACCELERATE_USE_CPU": "1",
    }
    AcceleratorState._reset_state()
    PartialState._reset_state()
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False, **options)
    accelerator = Accelerator(cpu=not CUDA, fsdp_plugin=plugin)
    if not CUDA:
        assert accelerator.distributed_type == DistributedType.MULTI_CPU, "accelerate shards on a CPU now: run its launcher"
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState().device = accelerator.state.device = torch.device("cpu")
    model = use_fdora(built(), fuse=False)
    if options["fsdp_version"] == 1:  # its parameters are others once it has wrapped them
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(sgd(model))
    else:
        model, optimizer = accelerator.prepare(model, sgd(model))
    losses = []
    for ids in batches():
        loss = loss_of(model, ids[dist.get_rank()])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    off = (torch.stack(losses) - alone()).abs().max().item()
    assert off <= (1e-4 if CUDA else 0), f"losses are {off} off those of whole parameters"
    rows = report(model)
    assert len(rows) == LAYERS and all(row.fused == STEPS and not row.fallbacks for row in rows), rows
    return model


def case_fsdp2_blocks():
    model = shards(fsdp_version=2, **BLOCKS)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def case_fsdp2_blocks_kept_gathered():
    shards(fsdp_version=2, reshard_after_forward=False, **BLOCKS)


def case_fsdp1_blocks_with_original_parameters():
    shards(fsdp_version=1, use_orig_params=True, state_dict_type="FULL_STATE_DICT", **BLOCKS)


def case_fsdp1_leaves():
    """PEFT's own policy, as Axolotl, ms-swift and LLaMA-Factory v0 ask for it: A, B and m are units of their own."""
    from peft.utils.other import fsdp_auto_wrap_policy

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "LlamaDecoderLayer"
    shards(fsdp_version=1, use_orig_params=False, auto_wrap_policy=fsdp_auto_wrap_policy(built()))


if __name__ == "__main__":
    run(globals())
