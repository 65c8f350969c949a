"""TRL's SFTTrainer in two processes: a base that transformers shards as it loads it (FSDP2), with fdora; and stock PEFT under DDP.

Accelerate's own FSDP wants GPUs; on a CPU this is transformers' entry point, ``DistributedConfig(fsdp_size=...)``.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fdora.integrations.peft import enabled, report
from tests.distributed.world import run
from tests.integrations import tiny
from tests.integrations.test_trl import trained, trainer

STEPS, SETTINGS = 6, {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0}


def parameters(made):
    values = {n.removeprefix("module."): p for n, p in made.model.named_parameters() if p.requires_grad}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in values.items()}


def case_sft_under_fsdp2():
    folder, rank = Path(os.environ["FOLDER"]), dist.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    if rank == 0:
        tiny.llama().save_pretrained(folder / "base")
    dist.barrier()
    stock = trainer(folder / "stock", STEPS, **SETTINGS)
    start = parameters(stock)
    wanted, want = trained(stock)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=DistributedConfig(fsdp_size=2))
    assert type(base.model.layers[0].mlp.up_proj.weight).__name__ == "DTensor"
    with enabled():
        ours = trainer(folder / "ours", STEPS, model=base, **SETTINGS)
    for n, p in parameters(ours).items():
        torch.testing.assert_close(p, start[n], rtol=1e-6, atol=1e-6)
    losses, got = trained(ours)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=2e-5)
    everyone = [None] * 2
    dist.all_gather_object(everyone, got)
    for n, p in want.items():
        moved = (p - start[n]).norm()
        assert moved > 1e-4 and (got[n] - p).norm() < 1e-2 * moved, n
        assert torch.equal(everyone[0][n], everyone[1][n]), n
    assert all(row.fused and not row.fallbacks for row in report(ours.model))


if __name__ == "__main__":
    run(globals())
