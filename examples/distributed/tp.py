# tp.py
import os

import torch
from decoder import Decoder, S, loss_of
from torch.distributed.device_mesh import init_device_mesh

from fdora.functional import dora_norm_tree

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = Decoder().to(device)
for block in model.blocks:
    block.parallelize(mesh)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
ids = torch.randint(0, 32, (4, 16), device=device)  # the same in every process

for step in range(3):
    weights = [dict(block.W) for block in model.blocks]
    params = [{n: (block.A[n], block.B[n]) for n in block.W} for block in model.blocks]
    norms = dora_norm_tree(weights, params, s=S)  # one all-reduce, for o and down of all blocks
    for block, c in zip(model.blocks, norms, strict=True):
        block.norms = c
    loss = loss_of(model(ids, mesh), ids)
    loss.backward()
    for p in trained:  # gradients of what is replicated are sums that are still pending
        p.grad = p.grad.redistribute(placements=p.placements)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} of process {mesh.get_rank()}: loss {loss.item():.5f}")

torch.distributed.destroy_process_group()
