"""Every promise of tests/checks/mlp.py."""

import pytest

from tests.checks.mlp import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_mlp(check):
    check()
