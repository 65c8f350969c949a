"""PEFT's DoRA on HQQ layers, by the library. Run by test_peft_hqq.py in a process of its own."""

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear
from peft import LoraConfig, get_peft_model
from torch import nn

from fdora.integrations.peft import report, restore, use_fdora
from fdora.quant import from_hqq
from tests import device
from tests.close import assert_compiles, rel_l2
from tests.integrations.models import perturb
from tests.integrations.one_layer import assert_one_call, inputs, step, trained

K, N = 64, 128
HALF = torch.bfloat16


def model(dtype=torch.float32, dropout=0.0, **config):
    torch.manual_seed(0)
    config = BaseQuantizeConfig(**{"nbits": 4, "group_size": 32, "axis": 1} | config)
    base = nn.Sequential(HQQLinear(nn.Linear(K, N), config, compute_dtype=dtype, device=device.NAME))
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["0"], use_dora=True, lora_dropout=dropout)
    made = perturb(get_peft_model(base, adapters))
    assert type(made.base_model.model[0]).__name__ == "HqqLoraLinear"
    return made


@pytest.mark.parametrize("config", [{}, {"axis": 0}, {"nbits": 8}, {"nbits": 2, "group_size": 16}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16], ids=str)
def test_one_call(config, dtype):
    made, x = model(dtype, **config), inputs(K, dtype)
    row = assert_one_call(made, x, dtype, from_hqq(made.base_model.model[0].base_layer).dequantize(torch.float64))
    assert row.weight == "hqq"


def test_under_autocast():
    made, x = model(), inputs(K, torch.float32)
    with torch.autocast(device.NAME, HALF):
        want, got = made(x), use_fdora(made)(x)
    assert got.dtype == HALF and rel_l2(got, want) < 2e-2


def test_three_bits_are_dequantised_by_hqq():
    made, x = model(nbits=3), inputs(K, torch.float32)
    for a, b in zip(step(made, x), step(use_fdora(made), x), strict=True):
        assert rel_l2(a, b) < 1e-5
    (row,) = report(made)
    assert (row.fused, row.composed, row.fallbacks, row.weight) == (0, 1, {}, "HQQ")
    assert "3bit_32" in row.why_not_fused


def test_a_backend_that_rounds_x_keeps_its_product(monkeypatch):
    made, x = model(), inputs(K, torch.float32)
    monkeypatch.setattr(HQQLinear, "forward", lambda self, x: 3 * self.forward_pytorch(x))
    want = made(x)
    assert rel_l2(use_fdora(made)(x), want) < 1e-5
    (row,) = report(made)
    assert (row.fused, row.composed) == (0, 1) and "HQQ backend" in row.why_not_fused
    for backend in (HQQBackend.PYTORCH_FORWARD, HQQBackend.PYTORCH):
        monkeypatch.setattr(HQQLinear, "forward", getattr(HQQLinear, backend.value))
        made(x)
    assert report(made)[0].fused == 2


def test_merge_and_the_way_back():
    made, x = use_fdora(model()), inputs(K, torch.float32)
    again = model()
    before = made(x)
    for each in (made, again):
        each.merge_adapter()
    assert rel_l2(made(x), again(x)) < 1e-5 and rel_l2(made(x), before) < 0.2
    for each in (made, again):
        each.unmerge_adapter()
    assert rel_l2(made(x), again(x)) < 1e-5
    assert type(restore(made).base_model.model[0]) is type(again.base_model.model[0])


def test_compiled_whole():
    made, x = use_fdora(model()), inputs(K, torch.float32)
    assert_compiles(lambda: made(x), [x, *trained(made)], 1e-5)
