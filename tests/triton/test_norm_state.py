"""Every promise of tests/checks/norm_state.py of the kernels: interpreted (TRITON_INTERPRET=1), or for real with --device cuda."""

import pytest
import torch

from fdora.functional import dora_norm, dora_norm_state
from tests import device  # noqa: F401 (read by the condition below)
from tests.checks.norm_state import CHECKS, OF_CODES, S, inputs, moved
from tests.triton.marks import DTYPES, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_norm_state(check, dtype):
    check("triton", dtype)


@pytest.mark.parametrize("check", OF_CODES, ids=lambda f: f.__name__)
def test_of_codes(check):
    check("triton", "nf4")


@pytest.mark.parametrize("dtype", [torch.float16, "nf4"], ids=str)
def test_a_state_of_the_other_backend_matches_nothing(dtype):
    W, A, B = inputs(dtype)
    for first, then in (("eager", "triton"), ("triton", "eager")):
        state = dora_norm(W, A, B, s=S, state=dora_norm_state(W), backend=first)
        assert moved(W, A, B, state, then)[1]


@pytest.mark.parametrize("dtype", [torch.float16, "nf4"], ids=str)
def test_more_tiles_than_programs_and_wide_words(dtype):
    """Each program of a guarded norm walks over several tiles, and each of the hash over several blocks."""
    W, A, B = inputs(dtype, 400, 300, 200)
    state, seen = moved(W, A, B, dora_norm_state(W), "triton")
    assert seen and not moved(W, A, B, state, "triton")[1]
    for t in (A, B):
        t[-1, -1] += 1
        state, seen = moved(W, A, B, state, "triton")
        assert seen
