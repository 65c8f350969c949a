"""What the cases share: meshes, tensors laid out on them, collectives that were run, and one comparison with whole tensors."""

import os
from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import device
from tests.close import assert_exact
from tests.make import tensors

DEVICE = os.environ.get("DEVICE", device.NAME)
R, S, P = Replicate(), Shard, Partial()
LAYER = {  # one mesh dimension; an x of two axes
    "col": dict(x=R, W=S(0), A=R, B=S(0), m=S(0), bias=S(0), norm=S(0)),
    "row": dict(x=S(1), W=S(1), A=S(1), B=R, m=R, bias=R, norm=R),
    "data": dict(x=S(0), W=R, A=R, B=R, m=R, bias=R, norm=R),
    "same": dict(x=R, W=R, A=R, B=R, m=R, bias=R, norm=R),
}
# Where y lies, gradients that lie otherwise than what they are of, collectives of a forward (row: of the norm and of y).
GIVES = {
    "col": (S(1), dict(x=P, A=P), 0),
    "row": (R, dict(B=P, m=P), 2),
    "data": (S(0), dict(A=P, B=P, m=P, bias=P), 0),
    "same": (R, {}, 0),
}
TRAINED = ("x", "A", "B", "m", "bias")


def mesh(*shape):
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp")[2 - len(shape) :])


def random(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(DEVICE)


def made(dtype=torch.float64, **sizes):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in tensors(dtype=dtype, **sizes).items()}


def laid(t, where, ways):
    """The tensors as DTensors, those that are trained as leaves. ``ways``: one for each mesh dimension."""
    out = {}
    for name, v in t.items():
        if not isinstance(v, torch.Tensor):
            out[name] = v
            continue
        v = distribute_tensor(v.detach(), where, [LAYER[way][name] for way in ways])
        out[name] = v.requires_grad_() if name in TRAINED else v
    return out


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def put(t, where, lies):
    """As a DTensor that lies so, one placement for each mesh dimension; None: as it is. Of a sum each of two has a share."""
    if lies is None:
        return t.detach()
    if lies == P:
        return DTensor.from_local(t.detach() * (0.25 + 0.5 * dist.get_rank()), where, [P], run_check=False)
    return distribute_tensor(t.detach(), where, lies if isinstance(lies, list) else [lies])


def check(fn, t, lies, out=None, gradients=None, forward=None, *, trained=TRAINED, where=None, backward=0, run=None, what=""):
    """fn on DTensors that lie so (``run``: a compiled fn), against fn on whole tensors: results and all gradients.

    Where told, also where results and gradients lie, and how many collectives there are.
    """
    where, run = where or mesh(2), run or fn
    names = [n for n in t if n.rstrip("0123456789") in trained]
    whole = {n: v.detach().clone().requires_grad_(n in names) for n, v in t.items()}
    cut = {n: put(v, where, lies[n]).requires_grad_(n in names) for n, v in t.items()}
    wants = as_list(fn(**whole))
    counting = nullcontext if forward is None else Collectives  # no graph is compiled under a mode
    with counting() as seen:
        gots = as_list(run(**cut))
    assert forward is None or sum(seen.count.values()) == forward, (what, seen.count)
    dys, there = [], []
    for i, (got, want) in enumerate(zip(gots, wants, strict=True)):
        assert got.shape == want.shape and (out is None or got.placements == (out,)), (what, got.placements)
        assert_exact(full(got).detach(), want.detach(), what)
        dys.append(random(*want.shape, seed=90 + i))
        there.append(distribute_tensor(dys[-1], where, [R if lie == P else lie for lie in got.placements]))
    if not names:
        return
    # Not through .grad, into which torch may copy: a partial sum becomes a whole one by that.
    used = [i for i, want in enumerate(wants) if want.requires_grad]
    of = [[each[i] for i in used] for each in (wants, dys, gots, there)]
    exact = torch.autograd.grad(of[0], [whole[n] for n in names], of[1], allow_unused=True)
    with counting() as seen:
        grads = torch.autograd.grad(of[2], [cut[n] for n in names], of[3], allow_unused=True)
    assert forward is None or sum(seen.count.values()) == backward, (what, seen.count)
    for n, grad, want in zip(names, grads, exact, strict=True):
        assert (grad is None) == (want is None), (what, n)
        if want is not None:
            assert isinstance(grad, DTensor) == (lies[n] is not None), (what, n)
            assert gradients is None or grad.placements[0] == gradients.get(n, lies[n]), (what, n, grad.placements)
            assert_exact(full(grad), want, f"{what}: gradient of {n}")


def as_list(found):
    return [*found] if isinstance(found, (tuple, list)) else [found]


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
