"""The bar that permuted.py gives: models in another order of units are the same function, and rounding is what they differ by."""

import pytest
import torch

pytest.importorskip("peft", reason="`make test` installs it")
from tests.integrations.permuted import QUANTILES, bar, permuted
from tests.integrations.sharded_cases import HEADS, built, in_float64, off, trained

IDS = torch.arange(3, 27).reshape(2, 12)


def test_the_same_function():
    first, other = in_float64(built(HEADS)), permuted(in_float64(built(HEADS)), 1)
    losses = [model(input_ids=IDS).logits.square().mean() for model in (first, other)]
    torch.testing.assert_close(*losses, rtol=1e-13, atol=0)
    sum(losses).backward()
    sizes = [{n: p.grad.norm() for n, p in trained(model)} for model in (first, other)]
    assert off(*sizes) < 1e-12
    assert off(*({n: p.grad for n, p in trained(model)} for model in (first, other))) > 0.1


def test_the_bar():
    scipy = pytest.importorskip("scipy.stats", reason="scipy has the quantiles; `make test` installs it")
    for n, quantile in QUANTILES.items():
        assert quantile == pytest.approx(scipy.t.ppf(0.995, n), abs=1e-3)
    assert bar([3.0, 4.0, 0.0, 5.0]) == pytest.approx(QUANTILES[4] * 12.5**0.5)
