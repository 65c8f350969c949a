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


def test_products_from_codes_are_checked_and_timed(monkeypatch, capsys):
    from bench import quant_forms

    monkeypatch.setattr(quant_forms, "DTYPE", HALF[0])
    monkeypatch.setattr(quant_forms, "CACHE", 1)
    monkeypatch.setattr(quant_forms, "vendor", lambda: None)
    monkeypatch.setattr(quant_forms, "FORMS", {"fp8": quant_forms.FORMS["fp8 block"]})
    monkeypatch.setattr(quant_forms, "FORWARD", {8: [(16, 128, 2, 2, 2, 1)]})
    monkeypatch.setattr(quant_forms, "COLUMNS", {8: [(64, 16, 2, 2, 2, 2)]})
    monkeypatch.setattr(quant_forms, "GEMMS", [(64, 64, 128, 4, 2)])
    shape, name = [(64, 128)], device.NAME
    rows = [*quant_forms.few_rows(name, shape, (3,), (8,)), *quant_forms.back_rows(name, shape, (3,), (8,))]
    rows += quant_forms.many_rows(name, shape, (70,), (8,))
    assert all(len(row["tiles"]) == 1 for row in rows)
    assert all(row["right"] == [True, True] for row in quant_forms.format_rows(name, shape, (3,)))
    assert "WRONG" not in capsys.readouterr().out
    wrong = quant_forms.searched(quant_forms.Timed("cpu", 1), lambda tile: lambda: torch.ones(2), [(1,)], torch.zeros(2) + 2)
    assert not wrong and "WRONG" in capsys.readouterr().out
