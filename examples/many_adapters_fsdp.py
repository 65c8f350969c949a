"""Three adapters of one model under FSDP2: banks are sharded as other parameters are, and each process has tokens of its own.

torchrun --nproc-per-node 2 examples/many_adapters_fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fdora.functional import dora_init, dora_linear_multi, dora_stack

WIDTH, R, SCALES = 64, 8, [2.0, 2.0, 1.0]  # s of each adapter


class Block(nn.Module):
    """A frozen linear layer, and a bank of its adapters: A (3, r, K), B (3, N, r), m (3, N)."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
        self.A, self.B, self.m = map(nn.Parameter, dora_stack([dora_init(self.W, R) for _ in SCALES]))

    def forward(self, x, ids):
        return x + dora_linear_multi(x, self.W, self.A, self.B, self.m, s=SCALES, ids=ids)


def train(model, x, ids, wanted):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        y = x
        for block in model:
            y = block(y, ids)
        loss = (y - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if not dist.is_initialized():
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, count = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")

torch.manual_seed(0)  # all processes begin with the same model, and keep their part of it
model = nn.ModuleList([Block() for _ in range(2)]).to(device)
for block in model:
    fully_shard(block)  # gathers W and the bank for its forward and its backward, and averages their gradients

x, wanted, ids = torch.randn(12 * count, WIDTH), torch.randn(12 * count, WIDTH), torch.arange(12 * count) % len(SCALES)
mine = [t.chunk(count)[rank].to(device) for t in (x, ids, wanted)]
losses = train(model, *mine)
print(f"process {rank}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
