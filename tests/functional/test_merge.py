"""Every promise of tests/checks/merge.py."""

import pytest

from tests.checks.merge import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_merge(check):
    check()
