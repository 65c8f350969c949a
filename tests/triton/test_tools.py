"""The commands of bench that write plans themselves: the search for tiles, and the cost of a launch."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.configs import GemmConfig, SmallConfig
from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels

pytestmark = needs_kernels

GEMMS = [GemmConfig(tma, 64, 64, 64, 8, False, False, 4, 3) for tma in (True, False)]
SCALES = [(64, 64, 128, fuse_dB, 4) for fuse_dB in (False, True)]
SMALLS = [SmallConfig(16, 64, 4, 2), SmallConfig(32, 64, 4, 2)]


@pytest.fixture
def tune(monkeypatch):
    """bench.tune on this device, with few candidates and no clock."""
    from bench import tune

    def medians(runs, *_):
        for fn in runs.values():
            fn()
        return {name: float(i) for i, name in enumerate(runs)}

    monkeypatch.setattr(tune, "DEVICE", device.NAME)
    monkeypatch.setattr(tune, "DTYPE", HALF[0])
    monkeypatch.setattr(tune, "medians", medians)
    monkeypatch.setattr(tune, "CACHE", 50_000)  # three weights in turn
    for name, few in (("GEMM_CANDIDATES", GEMMS), ("SCALE_CANDIDATES", SCALES), ("SMALL_CANDIDATES", SMALLS)):
        monkeypatch.setattr(tune, name, few)
    return tune


@pytest.mark.parametrize(
    ("op", "shape", "count"), [("gemm", (130, 128, 64, 16), 2), ("scale", (130, 64, 16), 2), ("small", (8, 64, 128), 2)]
)
def test_every_candidate_is_checked_and_timed(op, shape, count, tune):
    search, _ = tune.OPS[op]
    found = list(search([shape], {}))
    assert [row[0] for row in found] == {"gemm": [True, False], "scale": [None], "small": [False, True]}[op]
    assert all(len(results) == count for _, _, results, _ in found)  # none failed to run


def test_a_wrong_candidate_is_an_error(tune, monkeypatch):
    monkeypatch.setattr(tune, "planned", lambda write, *tensors: lambda *given: (torch.zeros(130, 128, device=device.NAME),))
    with pytest.raises(AssertionError, match="gemm is wrong"):
        list(tune.tune_gemm([(130, 128, 64, 16)], {}))


def test_every_piece_of_a_launch_runs(monkeypatch):
    from bench import launches

    if INTERPRETED:  # what no interpreter can do
        monkeypatch.setattr(launches, "by_triton_op", lambda partial, out: None)
    pieces = launches.pieces(device.NAME)
    partial = torch.randn(8, 512, device=device.NAME)
    torch.testing.assert_close(launches.by_plan(launches.plan_sums, partial), partial.sum(0))
    torch.testing.assert_close(launches.custom(partial), partial.sum(0))
    for piece in pieces.values():
        piece()
