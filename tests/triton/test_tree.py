"""Every promise of tests/checks/tree.py of the kernels: interpreted (TRITON_INTERPRET=1), or for real with --device cuda."""

import pytest

from tests import device  # noqa: F401 (read by the condition below)
from tests.checks.tree import CHECKS
from tests.triton.marks import DTYPES, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_tree(check, dtype):
    check("triton", dtype)
