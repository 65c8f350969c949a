"""Grids whose second axis has no room for all rows: flat, and the same bits. Interpreted, or for real with --device cuda."""

import pytest

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton import compose
from fdora.triton.runtime import device as of_device
from tests import device  # noqa: F401 (read by the mark)
from tests.triton.drawn import assert_same_bits, results
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import launches

CASES = {
    "linear": {"scale_kernel"},
    "multi": {"multi_h_kernel", "multi_scale_kernel"},
    "compose": {"compose_bwd_kernel"},
    "conv": {"planes_fwd_kernel", "planes_bwd_kernel"},
}


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_a_flat_grid_moves_no_bit(name, monkeypatch, chosen_anew):
    def grids():
        steps = [step for plan in chosen_anew.values() for step in launches(plan) if step.kernel.fn.__name__ in CASES[name]]
        return {(step.kernel.fn.__name__, len(step.grid)) for step in steps}

    monkeypatch.setattr(compose, "POINTS", 16)  # of a plane: it has several strips of them
    monkeypatch.setattr(compose, "STRIP", 32)
    before = [*results(name, 12, largest=400)]
    assert grids() == {(kernel, 2) for kernel in CASES[name]}
    monkeypatch.setattr(of_device, "MOST_ROWS", 0)
    chosen_anew.clear()
    assert_same_bits(results(name, 12, largest=400), before)
    assert grids() == {(kernel, 1) for kernel in CASES[name]}
