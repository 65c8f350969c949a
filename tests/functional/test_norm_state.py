"""Every promise of tests/checks/norm_state.py, in plain torch."""

import pytest
import torch

from tests.checks.norm_state import CHECKS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_norm_state(check, dtype):
    check("eager", dtype)
