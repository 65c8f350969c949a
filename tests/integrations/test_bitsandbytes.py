"""bitsandbytes for real: an NF4 base under DoRA, and the 8-bit AdamW that moves values and no version counter."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes; `make test` installs it")
import bitsandbytes as bnb

from fdora.integrations import _norm
from fdora.integrations.peft import report, restore, use_fdora
from tests import device
from tests.integrations.models import perturb

K, N = 64, 128


def nf4(dtype, dropout=0.0):
    """Two layers; PEFT knows a model of 4 bits by an attribute."""
    torch.manual_seed(0)
    made = [bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4") for sizes in ((K, N), (N, K))]
    base = nn.Sequential(made[0], nn.GELU(), made[1]).to(device.NAME)
    base.is_loaded_in_4bit = True
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2"], use_dora=True, lora_dropout=dropout)
    model = perturb(get_peft_model(base, config))
    assert type(model.base_model.model[0]).__name__ == "Linear4bit"
    return model


def step(model, x):
    torch.manual_seed(1)
    y = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), leaves)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_nf4(dtype, autocast, dropout):
    model, x = nf4(dtype, dropout), torch.randn(6, K, device=device.NAME, dtype=dtype, requires_grad=True)
    tolerance = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 and not autocast else dict(rtol=0.03, atol=0.03)
    with torch.autocast(device.NAME, torch.bfloat16, enabled=autocast):
        want = step(model, x)
        got = step(use_fdora(model), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), **tolerance)
    assert [(row.fused, row.composed, row.fallbacks) for row in report(model)] == [(0, 1, {})] * 2


def test_nf4_merges_as_in_peft():
    model, x = nf4(torch.float32).eval(), torch.randn(6, K, device=device.NAME)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # merging rounds to four bits again
        use_fdora(model).merge_adapter()
        ours = model(x)
        model.unmerge_adapter()
        again = nf4(torch.float32).eval()
        again.merge_adapter()
        torch.testing.assert_close(ours, again(x), rtol=1e-5, atol=1e-6)


def test_no_norm_is_stale_under_8_bit_adamw(monkeypatch):
    """After every step the next output is that of PEFT's own code on the same values."""
    monkeypatch.setattr(_norm, "SMALL", 0)
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).to(device.NAME)
    model = use_fdora(perturb(get_peft_model(base, LoraConfig(r=8, use_dora=True, target_modules=["0", "2"]))))
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = bnb.optim.AdamW8bit(leaves, lr=0.05, min_8bit_size=16)
    x = torch.randn(16, K, device=device.NAME)
    for _ in range(4):
        before = [(p._version, p.detach().clone()) for p in leaves]
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p._version == v and not torch.equal(p, old) for p, (v, old) in zip(leaves, before, strict=True))
        with torch.no_grad():
            torch.testing.assert_close(model(x), restore(copy.deepcopy(model))(x), rtol=1e-5, atol=1e-5)
