"""Every promise of tests/checks/conv.py."""

import pytest

from tests.checks.conv import CHECKS, layer, ours
from tests.close import assert_compiles


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_conv(check):
    check()


def test_compiled_whole():
    """fullgraph, forward and backward. Not with sizes of weights as symbols: inductor (torch 2.13) fails on torch's own there."""
    t, how = layer(groups=2, reads_all=True), {"groups": 2, "padding": 1, "padding_mode": "circular"}
    assert_compiles(lambda: ours(t, **how), [t[n].requires_grad_() for n in ("x", "A", "B", "m", "bias")], 1e-12)
