"""Every promise of tests/checks/conv.py."""

import pytest
import torch

from tests.checks.conv import CHECKS, layer, ours
from tests.close import assert_compiles


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_conv(check):
    check()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_an_output_may_be_written_over(form):
    """As nn.ReLU(inplace=True) behind a convolution does."""
    t, how = layer(2, torch.float32, size=(16, 24, 8))
    x, A = t["x"].to(memory_format=form), t["A"].requires_grad_()
    want = torch.autograd.grad(torch.relu(ours(t | {"x": x}, how)).sum(), A)[0]
    assert torch.equal(torch.autograd.grad(torch.relu_(ours(t | {"x": x}, how)).sum(), A)[0], want)


def test_compiled_whole():
    """fullgraph, forward and backward. Not with sizes of weights as symbols: inductor (torch 2.13) fails on torch's own there."""
    t, how = layer(2, groups=2, seen="all", padding=1, padding_mode="circular")
    assert_compiles(lambda: ours(t, how), [t[n].requires_grad_() for n in ("x", "A", "B", "m", "bias")], 1e-12)
