"""Layers as people train them (autocast, float32 adapters, dropout, 8-bit codes) that run the short way from their second call on:
the bits of the long way, and what changes between two calls is seen."""

import copy

import pytest
import torch
from torch import nn

from tests import device
from tests.close import rel_l2
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels
WIDTH = 128
RECIPES = {
    "autocast": {},
    "dropout": {"p": 0.3},
    "LoRA's dropout": {"p": 0.3, "dropout_mode": "lora"},
    "codes": {"compute": "fp8"},
    "codes twice": {"p": 0.3, "dropout_mode": "lora", "compute": "fp8", "grad_compute": "fp8", "transposed": True},
}


def made(recipe):
    """A gated MLP behind a layer of its own, under PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    from fdora.integrations.peft import use_fdora

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=2 * WIDTH)))
    names, how = ["0", "gate_proj", "up_proj", "down_proj"], dict(RECIPES[recipe])
    config = LoraConfig(r=4, use_dora=True, target_modules=names, lora_dropout=how.pop("p", 0.0), init_lora_weights=False)
    model = get_peft_model(model.to(device.NAME, HALF[0]), config).train()  # adapters are float32
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "magnitude" in name:
                p *= 1 + 0.3 * torch.randn_like(p)
    return use_fdora(model, fuse=True, **how)


def inputs():
    return torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(1)).to(device.NAME, HALF[0]).requires_grad_()


def run(model, x, autocast=True):
    torch.manual_seed(2)
    with torch.autocast(device.NAME, HALF[0], enabled=autocast):
        y = model(x)
    wanted = [x, *[p for p in model.parameters() if p.requires_grad]]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]


@pytest.fixture
def long_ways(kernels_everywhere, monkeypatch):
    """How many layers were looked at the long way."""
    from fdora import _dispatch
    from fdora.integrations._peft import blocks, calls, layer

    monkeypatch.setattr(_dispatch, "_forced", "triton")
    found = []
    for module in (blocks, layer):
        monkeypatch.setattr(module, "call_of", lambda *args: found.append(args[0]) or calls.call_of(*args))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_has_the_bits_of_the_long_way(recipe, long_ways):
    from fdora.integrations.peft import report

    model, x = made(recipe), inputs()
    first = run(model, x)
    assert len(long_ways) == 4
    again = [run(model, x) for _ in range(2)][-1]
    assert len(long_ways) == 4
    assert all(map(torch.equal, first, again))
    rows = report(model)
    assert [row.fused for row in rows] == [3] * 4
    assert all(row.codes == (3 if "codes" in recipe else 0) for row in rows)
    with torch.no_grad():  # without a graph, too
        torch.manual_seed(2)
        with torch.autocast(device.NAME, HALF[0]):
            assert torch.equal(model(x), first[0]) and len(long_ways) == 4


def dropouts(model):
    return [module for module in model.modules() if isinstance(module, nn.Dropout)]


def bases(model):
    return [module.base_layer for module in model.modules() if hasattr(module, "base_layer")]


def with_p(model):
    for dropout in dropouts(model):
        dropout.p = 0.6


def no_p(model):
    for dropout in dropouts(model):
        dropout.eval()


def meaning(model):
    from fdora.integrations.peft import use_fdora

    use_fdora(model, fuse=True, dropout_mode="lora")


def codes_versioned(model):
    with torch.no_grad():
        for base in bases(model):
            base.weight.copy_(base.weight.float().mul(-1).to(base.weight.dtype))


def scales_written(model):
    with torch.no_grad():
        for base in bases(model):
            base.weight_scale.mul_(2)


def scales_exchanged(model):
    for base in bases(model):
        base.weight_scale = nn.Parameter(2 * base.weight_scale.detach(), requires_grad=False)


CHANGES = {
    "p": ("dropout", with_p),
    "dropout in eval": ("dropout", no_p),
    "what dropout means": ("dropout", meaning),
    "a model in eval": ("dropout", nn.Module.eval),
    "codes in place": ("codes", codes_versioned),
    "codes in place, twice there": ("codes twice", codes_versioned),
    "scales in place": ("codes", scales_written),
    "another scale": ("codes", scales_exchanged),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls_is_seen(change, long_ways):
    recipe, changed = CHANGES[change]
    model, x = made(recipe), inputs()
    before = [run(model, x) for _ in range(2)][-1]
    assert len(long_ways) == 4
    changed(model)
    wanted = run(copy.deepcopy(model), x)  # a copy has run no way yet
    assert len(long_ways) > 4
    got = run(model, x)
    # The copy's norms are its layers' own, which add up in another order than the model's launch.
    assert all(rel_l2(a, b) < 5e-3 for a, b in zip(got, wanted, strict=True))
    assert rel_l2(got[0], before[0]) > 0.05


@pytest.mark.parametrize("recipe", ["autocast", "codes"])
def test_autocast_may_end(recipe, long_ways):
    model, x = made(recipe), inputs()
    for autocast in (True, False, True):
        run(model, x, autocast)
        count = len(long_ways)
        assert run(model, x, autocast)[0].dtype == HALF[0] and len(long_ways) == count  # its own short way


def test_an_x_that_autocast_rounds(long_ways):
    model, x = made("LoRA's dropout"), inputs().detach().float().requires_grad_()
    first, again = run(model, x), run(model, x)
    assert len(long_ways) == 4 and again[1].dtype == torch.float32
    assert all(map(torch.equal, first, again))
