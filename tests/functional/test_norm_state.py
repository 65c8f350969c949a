"""Every promise of tests/checks/norm_state.py, in plain torch."""

import pytest
import torch

from tests.checks.norm_state import CHECKS, OF_CODES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_norm_state(check, dtype):
    check("eager", dtype)


@pytest.mark.parametrize("check", OF_CODES, ids=lambda f: f.__name__)
def test_of_codes(check):
    check("eager", "nf4")
