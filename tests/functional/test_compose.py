"""Every promise of tests/checks/compose.py."""

import pytest

from tests.checks.compose import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_compose(check):
    check()
