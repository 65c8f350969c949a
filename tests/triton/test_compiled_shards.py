"""Blocks that are compiled one by one and sharded by FSDP2: they take the norms of their unit, keep their own, or take those of
the shards.

One process is enough: its shards are whole, but a DTensor stands in the place of each weight between two forwards, and what
is gathered comes and goes. Several processes: tests/integrations/test_sharded.py.
"""

import copy

import pytest
import torch
from torch import nn

from tests import device
from tests.triton.changes import adapted
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compiled_model import assert_close

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_everywhere")]
X = torch.linspace(-1, 1, 5 * 48).view(5, 48)


def made(*blocks):
    """Of layers 48 to 32 and back, so many in each block."""
    layers = iter([nn.Linear(48, 32), nn.Linear(32, 48)])
    return adapted(nn.Sequential(*[nn.Sequential(*[next(layers) for _ in range(n)]) for n in blocks]), r"\d\.\d")


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in model.base_model.model:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model):
    model.zero_grad()
    y = model(X.to(device.NAME, HALF[0]))
    y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


@torch.no_grad()
def change(model, what):
    for name, p in model.named_parameters():
        if what in name:
            (p.to_local() if hasattr(p, "to_local") else p).mul_(1.25)


def agree(model, eager, norms, kept):
    for what in ("lora_A", "base_layer.weight", "lora_B"):
        norms.launches.clear()
        assert_close(step(model), step(eager))
        assert len(norms.of("layer in place")) == kept
        for each in (model, eager):
            change(each, what)
    assert_close(step(model), step(eager))


def layers(model):
    return [layer for block in model.base_model.model for layer in block]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("blocks", [(2,), (1, 1)])
def test_norms_are_kept(norms, mesh, blocks, first):
    """Of a unit by one call, of a layer alone in its unit by itself. ``first``: use_fdora before the shards, or of shards."""
    from fdora.integrations.peft import use_fdora

    model = made(*blocks)
    eager = use_fdora(copy.deepcopy(model))
    if first:
        use_fdora(model)
    sharded(model, mesh)
    if not first:
        use_fdora(model)
    step(model)  # in the first forward layers ask before the hooks know of them
    agree(model, eager, norms, 0 if len(blocks) == 1 else 2)
    norms.launches.clear()
    step(model)
    norms.poison(2, "model" if len(blocks) == 1 else "layer in place")  # what is reused
    assert not torch.allclose(step(model)[0], step(eager)[0], rtol=0.1)


def test_norms_of_the_shards(norms, mesh, monkeypatch):
    from fdora.integrations._shard_norms import ShardNorms
    from fdora.integrations.peft import use_fdora

    served, before = [], ShardNorms.c_of

    def counted(*args):
        c = before(*args)
        served.append(c is not None)
        return c

    monkeypatch.setattr(ShardNorms, "c_of", counted)
    model = made(2)
    eager = use_fdora(copy.deepcopy(model))
    agree(sharded(use_fdora(model, norms_on_shards=True), mesh), eager, norms, 0)
    assert served == [True, True] * 4
