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
from tests.close import assert_compiles, rel_l2
from tests.integrations.models import perturb
from tests.integrations.one_layer import assert_one_call, inputs, trained

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


ROUNDING = {"int8": 0.02, "fp8": 0.06, "affine": 0.15}  # of the format's bits


@pytest.mark.parametrize("kind", FORMATS)
def test_merge_copy_and_the_way_back(kind):
    """PEFT's own merge leaves the magnitude out."""
    made, x = model(FORMATS[kind]()), inputs(K, torch.float32).detach()
    with torch.no_grad():
        made.base_model.model[0].lora_magnitude_vector["default"].weight.mul_(1 + 0.5 * torch.randn(N))
        stock, before = copy.deepcopy(made), use_fdora(made)(x)
        stock.merge_adapter()
        assert rel_l2(stock(x), before) > 0.3  # what PEFT does
        assert torch.equal(copy.deepcopy(made)(x), before)
        made.merge_adapter()
        assert rel_l2(made(x), before) < ROUNDING[kind]
        made.unmerge_adapter()
        assert rel_l2(made(x), before) < 2 * ROUNDING[kind]
    layer = restore(made).base_model.model[0]
    assert type(layer).__module__.startswith("peft.") and "get_delta_weight" not in vars(layer)
    assert report(made)[0].weight == kind


def test_one_merge_after_another():
    """Of a layer with a second adapter; one without a magnitude merges as PEFT has it."""
    made, x = model(FORMATS["int8"]()), inputs(K, torch.float32).detach()
    for name, dora in (("lora", False), ("second", True)):
        made.add_adapter(name, LoraConfig(r=4, use_dora=dora, target_modules=["0"], init_lora_weights=False))
    use_fdora(made)
    with torch.no_grad():
        made.set_adapter("lora")
        before = made(x)
        made.merge_adapter(["lora"])
        assert rel_l2(made(x), before) < ROUNDING["int8"]
        made.unmerge_adapter()
        made.merge_adapter(["default"])
        with pytest.raises(NotImplementedError, match="another adapter is merged already"):
            made.merge_adapter(["second"])
    assert "get_delta_weight" not in vars(made.base_model.model[0])


def test_compiled_whole():
    made, x = use_fdora(model(FORMATS["int8"]())), inputs(K, torch.float32)
    assert_compiles(lambda: made(x), [x, *trained(made)], 1e-5)
