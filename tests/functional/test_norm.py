"""Every promise of tests/checks/norm.py."""

import pytest

from tests.checks.norm import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_norm(check):
    check()
