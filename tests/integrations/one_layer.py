"""A PEFT model of one DoRA layer: its gradients, the truth in float64, and that fdora's one call is as near to it as PEFT."""

import torch

from fdora.integrations.peft import report, use_fdora
from tests import device, reference
from tests.close import assert_within

S = 2.0  # lora_alpha 16, r 8


def trained(made):
    layer = made.base_model.model[0]
    return [part["default"].weight for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)]


def step(made, x):
    torch.manual_seed(1)
    y = made(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *trained(made)])]


def truth(made, x, W):
    base, parameters = made.base_model.model[0].base_layer, [p.detach().double().requires_grad_() for p in trained(made)]
    x = x.detach().double().requires_grad_()
    y = reference.dora(x, W, *parameters, S, base.bias)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *parameters])]


def inputs(K, dtype):
    torch.manual_seed(1)
    return torch.randn(6, K, device=device.NAME).to(dtype).requires_grad_()


def assert_one_call(made, x, dtype, W):
    """W (N, K) in float64, as it is stored. The row of the report."""
    with torch.autocast(device.NAME, dtype, enabled=dtype != torch.float32):  # else PEFT's adapters run in float32
        stock = step(made, x)
    got = step(use_fdora(made), x)
    for a, b, c in zip(got, stock, truth(made, x, W), strict=True):
        assert_within(a, b, c)
    assert got[0].dtype == dtype
    (row,) = report(made)
    assert (row.fused, row.composed, row.fallbacks) == (1, 0, {})
    return row
