"""A DoRA adapter merged into a torchao weight: PEFT leaves the magnitude out, fdora does not."""

import sys
import types
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.torchao import TorchaoLoraLinear
from torch import nn

from fdora.integrations.peft import restore, use_fdora
from tests.process import run_cases


class Weight(nn.Parameter):
    """Quantised in name only."""

    def dequantize(self):
        return self.detach().clone().as_subclass(torch.Tensor)


Weight.__module__ = "torchao.float"  # where PEFT's helper looks


def quantize_(layer, _=None):
    value = layer.weight.detach().as_subclass(torch.Tensor)
    del layer.weight
    layer.weight = Weight(value, requires_grad=False)


@pytest.fixture
def no_quantisation(monkeypatch):
    """torchao's part of PEFT's merge, with a weight that stays float: PEFT refuses the torchao that torchtune needs here.

    Called when the models are made, for PEFT looks for a real torchao then.
    """

    def put():
        package, inner = types.ModuleType("torchao"), types.ModuleType("torchao.quantization")
        package.quantize_ = quantize_
        inner.Int4Tensor = type("Int4Tensor", (), {})
        monkeypatch.setitem(sys.modules, "torchao", package)
        monkeypatch.setitem(sys.modules, "torchao.quantization", inner)

    return put


def model(*names, dora=True):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(24, 40))
    made = get_peft_model(base, LoraConfig(r=4, use_dora=dora, target_modules=["0"], init_lora_weights=False))
    layer = made.base_model.model[0]
    quantize_(layer.base_layer)
    layer.__class__, layer.get_apply_tensor_subclass = TorchaoLoraLinear, lambda: None
    for name in names:
        made.add_adapter(name, LoraConfig(r=4, use_dora=dora, target_modules=["0"], init_lora_weights=False))
    with torch.no_grad():
        for magnitude in layer.lora_magnitude_vector.values():
            magnitude.weight.mul_(1 + 0.3 * torch.randn(40))
    return made.eval()


def test_merge_is_the_forward_and_unmerge_the_way_back(no_quantisation):
    x = torch.randn(5, 24)
    stock, ours = model(), use_fdora(model())
    no_quantisation()
    before = stock(x)
    stock.merge_adapter()
    assert (stock(x) - before).norm() / before.norm() > 0.05  # what PEFT does
    weight = ours.base_model.model[0].base_layer.weight.clone()
    before = ours(x)
    for _ in range(2):
        ours.merge_adapter()
        torch.testing.assert_close(ours(x), before, rtol=1e-4, atol=1e-5)
        ours.unmerge_adapter()
        torch.testing.assert_close(ours.base_model.model[0].base_layer.weight, weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours(x), before, rtol=1e-4, atol=1e-5)
    restore(ours)
    assert type(ours.base_model.model[0]) is TorchaoLoraLinear and "get_delta_weight" not in vars(ours.base_model.model[0])


def test_without_a_magnitude_and_one_after_the_other(no_quantisation):
    lora, two = use_fdora_if_any(model(dora=False)), use_fdora(model("other"))
    no_quantisation()
    x = torch.randn(5, 24)
    before = lora(x)
    lora.merge_adapter()
    torch.testing.assert_close(lora(x), before, rtol=1e-4, atol=1e-5)
    two.merge_adapter(["default"])
    with pytest.raises(NotImplementedError, match="another adapter is merged already"):
        two.merge_adapter(["other"])
    assert "get_delta_weight" not in vars(two.base_model.model[0])


def use_fdora_if_any(made):
    """A layer without a magnitude, whose class is ours all the same."""
    from fdora.integrations._peft.layer import fuse_layer

    fuse_layer(made.base_model.model[0])
    return made


def test_the_library():
    quiet = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}
    run_cases(Path(__file__).with_name("peft_torchao_cases.py"), "torchao", 12, **quiet)
