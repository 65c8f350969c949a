"""A slice of tests/cases.py for CI: every function in plain torch, and what hypothesis makes of the same choices."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdora import functional
from tests import device
from tests.cases import CALLS, FUNCTIONS, Draw, rounds, run_case, usual

SMALL = 40


def drawn(**change):
    return usual(device.NAME)._replace(**{"largest": SMALL} | change)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_slice(name):
    for k in range(12):
        run_case(name, f"{name} {k}", drawn())


@pytest.mark.parametrize("name", ["linear", "group", "mlp", "multi", "experts", "experts_mlp", "conv"])
def test_autocast(name):
    """Products in its dtype, gradients in their parameter's, backward inside of it and outside."""
    for k in range(12):
        run_case(name, f"{name} {k}", drawn(autocast="bf16", dtypes=["fp32"] if "experts" in name else ["fp32", "fp16"]))


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(choices=st.randoms(use_true_random=False))
def test_what_nobody_thought_of(name, choices):
    list(rounds(name, lambda part: Draw(choices, drawn())))


def test_every_public_function_that_computes_is_drawn():
    """What is left out is made of these, and has tests of its own."""
    composed = {"dora_merge_tree", "dora_init_tree", "dora_merge_quantized"}
    others = {"dora_stack", "dora_unstack"}  # they lay tensors out
    public = {n for n in functional.__all__ if n.startswith("dora_")}
    assert set(CALLS) <= public and public - set(CALLS) == composed | others
