"""Every promise of the checks that need nothing beside them."""

import pytest

from tests.checks import merge, mlp, norm


@pytest.mark.parametrize("module", [merge, mlp, norm], ids=lambda module: module.__name__.rpartition(".")[2])
def test_promises(module):
    for check in module.CHECKS:
        check()
