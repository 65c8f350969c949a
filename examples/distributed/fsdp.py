# fsdp.py
import os

import torch
from decoder import Decoder, S, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fdora.functional import dora_norm_tree

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = Decoder().to(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.randint(0, 32, (4, 16), device=device).chunk(mesh.size())[mesh.get_rank()]  # this process's share

for step in range(3):
    weights = [dict(block.W) for block in model.blocks]
    params = [{n: (block.A[n], block.B[n]) for n in block.W} for block in model.blocks]
    norms = dora_norm_tree(weights, params, s=S, gather=True)  # on the shards: no weight is sent
    for block, c in zip(model.blocks, norms, strict=True):
        block.norms = c
    loss = loss_of(model(ids), ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} of process {mesh.get_rank()}: loss {loss.item():.5f}")

torch.distributed.destroy_process_group()
