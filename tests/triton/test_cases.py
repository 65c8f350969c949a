"""A slice of tests/cases.py on the kernels: outputs and gradients against float64, bits from call to call, any strides and sizes."""

import random

import pytest

from tests import device
from tests.cases import Draw, rounds, usual
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)

pytestmark = needs_kernels
COUNTS = {"linear": 18, "group": 10, "mlp": 8, "norm": 12, "multi": 8, "experts": 6, "merge": 8, "unmerge": 4, "compose": 8}
COUNTS |= {"delta": 4, "embedding": 8, "conv": 3, "base_sqnorm": 3}


@pytest.mark.parametrize("name", COUNTS)
def test_a_slice(name):
    drawn = usual(device.NAME, "triton")
    for k in range(COUNTS[name]):
        # few tokens and many, tiles that are filled and ragged ones; now and then a long axis, which takes more than one
        size = drawn._replace(largest=300 if k % 6 == 5 else drawn.largest)
        assert max(rounds(name, lambda part: Draw(random.Random(f"{name} {k} {part}"), size))) <= 1
