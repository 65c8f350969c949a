"""tests/test_transforms.py on the kernels, in float32: gradients, also of each token, banks of adapters, compiled."""

import pytest
import torch

from fdora import _dispatch
from tests import device  # noqa: F401 (read by the mark)
from tests import test_transforms as of
from tests.close import rel_l2
from tests.triton.marks import INTERPRETED, needs_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    def near(got, want, what=""):
        assert rel_l2(got, want) < 1e-5 or torch.equal(got, want), what

    monkeypatch.setattr(_dispatch, "_forced", "triton")
    monkeypatch.setattr(of, "DTYPE", torch.float32)
    monkeypatch.setattr(of, "assert_exact", near)
    monkeypatch.setattr(of, "LENGTHS", (5, 96, 130))  # few tokens, and tiles
    if INTERPRETED:
        monkeypatch.setattr(of, "INDUCTOR", ())


COMPILED = ("norm", "merge", "linear_bias", "linear_dropout", "linear_dropout_peft", "group", "mlp")
CASES = {
    of.test_func_grad: of.GRAD,
    of.test_vmap_over_tokens: of.TOKENS,
    of.test_vmap_over_a_bank_of_adapters: of.OPS,
    of.test_compile: COMPILED,
    of.test_compiled_func_grad: ("linear_bias",),
}


@pytest.mark.parametrize(("check", "name"), [(check, name) for check, names in CASES.items() for name in names])
def test_as_the_plain_call(check, name):
    check(name)
