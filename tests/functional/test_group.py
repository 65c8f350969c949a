"""Every promise of tests/checks/group.py."""

import pytest

from tests.checks.group import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_group(check):
    check()
