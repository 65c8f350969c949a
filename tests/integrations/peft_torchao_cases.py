"""PEFT's DoRA on torchao 0.18's tensors, by the library. Run by test_peft_torchao.py in a process of its own."""

import copy
import warnings

import pytest
import torch
import torchao.quantization as ao
from peft import LoraConfig, get_peft_model
from torch import nn

from fdora.integrations.peft import report, restore, use_fdora
from fdora.quant import from_torchao
from tests import device
from tests.close import rel_l2
from tests.integrations.models import perturb
from tests.integrations.one_layer import assert_one_call, inputs, step

K, N = 128, 256
HALF = torch.bfloat16
FORMATS = {
    "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
    "fp8": lambda: ao.Float8WeightOnlyConfig(version=2),
    "affine": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32), version=2),
}
ROUNDED = {
    "int8": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "affine": lambda: ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)),
}


def model(config, dtype=torch.float32, dropout=0.0):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(K, N, dtype=dtype)).to(device.NAME)
    ao.quantize_(base, config)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["0"], use_dora=True, lora_dropout=dropout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of merges
        made = perturb(get_peft_model(base, adapters))
    assert type(made.base_model.model[0]).__name__ == "TorchaoLoraLinear"
    made.base_model.model[0].get_apply_tensor_subclass = lambda: config
    return made


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_one_call(kind, dtype):
    made, x = model(FORMATS[kind](), dtype), inputs(K, dtype)
    row = assert_one_call(made, x, dtype, from_torchao(made.base_model.model[0].base_layer.weight).dequantize(torch.float64))
    assert (row.weight, row.layout) == (kind, None)


@pytest.mark.parametrize("kind", ROUNDED)
def test_what_rounds_x_keeps_its_product(kind):
    made, x = model(ROUNDED[kind]()), inputs(K, torch.float32).detach()
    with torch.no_grad():
        want = made(x)
        assert rel_l2(use_fdora(made)(x), want) < 1e-5
    (row,) = report(made)
    assert (row.fused, row.composed, row.fallbacks, row.weight) == (0, 1, {}, kind)
    assert "torchao rounds x too" in row.why_not_fused


@pytest.mark.parametrize("kind", FORMATS)
def test_merge_copy_and_the_way_back(kind):
    made, x = use_fdora(model(FORMATS[kind]())), inputs(K, torch.float32).detach()
    with torch.no_grad():
        before = made(x)
        assert torch.equal(copy.deepcopy(made)(x), before)
        made.merge_adapter()
        assert rel_l2(made(x), before) < 0.15  # rounded to the format's bits
        made.unmerge_adapter()
        assert rel_l2(made(x), before) < 0.2
    assert type(restore(made).base_model.model[0]).__module__.startswith("peft.")
    assert report(made)[0].weight == kind


def test_compiled_whole():
    made, x = use_fdora(model(FORMATS["int8"]())), inputs(K, torch.float32)
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for a, b in zip(step(compiled, x), step(made, x), strict=True):
        assert rel_l2(a, b) < 1e-5
