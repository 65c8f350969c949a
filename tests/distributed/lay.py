"""What the cases share: meshes, tensors laid out on them, collectives that were run."""

import os
from collections import Counter

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import device
from tests.make import tensors

DEVICE = os.environ.get("DEVICE", device.NAME)
R = Replicate()
LAYER = {  # one mesh dimension; an x of two axes
    "col": dict(x=R, W=Shard(0), A=R, B=Shard(0), m=Shard(0), bias=Shard(0), norm=Shard(0)),
    "row": dict(x=Shard(1), W=Shard(1), A=Shard(1), B=R, m=R, bias=R, norm=R),
    "data": dict(x=Shard(0), W=R, A=R, B=R, m=R, bias=R, norm=R),
    "same": dict(x=R, W=R, A=R, B=R, m=R, bias=R, norm=R),
}
TRAINED = ("x", "A", "B", "m", "bias")


def mesh(*shape):
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp")[2 - len(shape) :])


def made(dtype=torch.float64, **sizes):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in tensors(dtype=dtype, **sizes).items()}


def laid(t, where, ways, **names):
    """The tensors as DTensors, those that are trained as leaves. ``ways``: one for each mesh dimension."""
    out = {}
    for name, v in t.items():
        if not isinstance(v, torch.Tensor):
            out[name] = v
            continue
        v = distribute_tensor(v.detach(), where, [LAYER[way][names.get(name, name)] for way in ways])
        out[name] = v.requires_grad_() if name in TRAINED else v
    return out


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


class Collectives(TorchDispatchMode):
    """How often each kind ran inside the block."""

    def __enter__(self):
        self.count = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, op = func.name().partition("::")
        if any(t is DTensor for t in types):
            return NotImplemented
        if namespace in ("c10d", "_c10d_functional") and not op.startswith(("wait", "_wrap", "wrap")):
            self.count[op.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))
