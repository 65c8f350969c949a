"""Every promise of tests/checks/tree.py, in plain torch."""

import pytest
import torch

from tests.checks.tree import CHECKS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_tree(check, dtype):
    check("eager", dtype)
