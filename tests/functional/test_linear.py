"""Every promise of tests/checks/linear.py."""

import pytest
import torch

from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_mlp
from tests.checks.linear import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_linear(check):
    check()


@pytest.mark.parametrize("call", ["linear", "group", "mlp"])
def test_an_output_may_be_written_over(call):
    """Models do, with clamp_ and the like; no dm is asked for, which would read it."""
    torch.manual_seed(0)
    x, W = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, 8)
    A, B, m = torch.randn(2, 8), torch.randn(8, 2), torch.rand(8)
    layer = DoraLayer(W, A, B, m, 2.0)
    if call == "linear":
        y = dora_linear(x, W, A, B, m, s=2.0)
    else:
        y = dora_linear_group(x, [layer, layer])[0] if call == "group" else dora_mlp(x, layer, layer, layer, act="silu")
    want = torch.autograd.grad(y.clone().mul_(2).sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y.mul_(2).sum(), x)[0], want)
