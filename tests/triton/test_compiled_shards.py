"""Blocks that are compiled one by one and sharded by FSDP2: they keep their norms, or take those of the shards.

One process is enough: its shards are whole, but a DTensor stands in the place of each weight between two forwards, and what
is gathered comes and goes. Several processes: tests/integrations/test_sharded.py.
"""

import copy

import pytest
import torch
from torch import nn

from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compiled_model import assert_close

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_everywhere")]
X = torch.linspace(-1, 1, 5 * 48).view(5, 48)


@pytest.fixture
def model():
    from peft import LoraConfig, get_peft_model

    block = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48))
    base = nn.Sequential(block).to(device.NAME, HALF[0])
    config = LoraConfig(r=4, use_dora=True, target_modules=["0.0", "0.1"])
    made = get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora" in name:
                p.add_(torch.randn_like(p), alpha=0.1)
    return made


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    block = model.base_model.model[0]
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


def agree(model, eager, own, kept):
    for what in ("lora_A", "base_layer.weight", "lora_B"):
        own.clear()
        assert_close(step(model), step(eager))
        assert own["_kept"] == kept
        for each in (model, eager):
            change(each, what)
    assert_close(step(model), step(eager))


@pytest.mark.parametrize("first", [True, False])
def test_norms_are_kept(model, own, mesh, first):
    """``first``: use_fdora before the shards, or of shards."""
    from fdora.integrations.peft import use_fdora

    eager = use_fdora(copy.deepcopy(model))
    if first:
        use_fdora(model)
    sharded(model, mesh)
    if not first:
        use_fdora(model)
    agree(model, eager, own, 2)
    for layer in model.base_model.model[0]:
        layer.lora_variant["default"].kept.room[1].data.mul_(2)  # what is reused
    assert not torch.allclose(step(model)[0], step(eager)[0], rtol=0.1)


def test_norms_of_the_shards(model, own, mesh, monkeypatch):
    from fdora.integrations._shard_norms import ShardNorms
    from fdora.integrations.peft import use_fdora

    served, before = [], ShardNorms.c_of

    def counted(*args):
        c = before(*args)
        served.append(c is not None)
        return c

    monkeypatch.setattr(ShardNorms, "c_of", counted)
    eager = use_fdora(copy.deepcopy(model))
    agree(sharded(use_fdora(model, norms_on_shards=True), mesh), eager, own, 0)
    assert served == [True, True] * 4
