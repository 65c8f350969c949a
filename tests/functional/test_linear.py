"""Every promise of tests/checks/linear.py, and of every function whose output a model may write over."""

import pytest
import torch

from fdora.functional import DoraLayer, dora_embedding, dora_linear, dora_linear_group, dora_mlp
from tests.checks import conv, embedding, multi
from tests.checks.linear import CHECKS
from tests.make import tensors


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_linear(check):
    check()


def convolved(form):
    t = conv.layer(dtype=torch.float32)
    t["x"] = t["x"].to(memory_format=form)
    return lambda: conv.ours(t), t["A"].requires_grad_()


def embedded():
    W, A, B, m = embedding.table(dtype=torch.float32)
    return lambda: dora_embedding(embedding.numbers(), W, A, B, m, s=2.0), A.requires_grad_()


def of_many():
    t = multi.case(bias=False)
    return lambda: multi.together(t), t.x.requires_grad_()


def of_layers(call):
    t = tensors(8, 8, 2, (2, 3), torch.float32)
    x, la = t["x"].requires_grad_(), DoraLayer(*(t[n] for n in "WABm"), 2.0)
    return lambda: call(x, la), x


CALLS = {
    "linear": lambda: of_layers(lambda x, la: dora_linear(x, **la._asdict())),
    "group": lambda: of_layers(lambda x, la: dora_linear_group(x, [la, la])[0]),
    "mlp": lambda: of_layers(lambda x, la: dora_mlp(x, la, la, la)),
    "multi": of_many,
    "embedding": embedded,
    "conv": lambda: convolved(torch.contiguous_format),
    "conv, channels last": lambda: convolved(torch.channels_last),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_output_may_be_written_over(name):
    """Models do, with clamp_, nn.ReLU(inplace=True) and the like; no dm is asked for, which would read it."""
    call, leaf = CALLS[name]()
    want = torch.autograd.grad(call().mul(2).sum(), leaf)[0]
    assert torch.equal(torch.autograd.grad(call().mul_(2).sum(), leaf)[0], want)
