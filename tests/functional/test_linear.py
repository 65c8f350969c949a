"""Every promise of tests/checks/linear.py."""

import pytest

from tests.checks.linear import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_linear(check):
    check()
