"""docs/quantised.md keeps its word."""

import re

import pytest
import torch

from bench import quant_error
from fdora.quant import part, quantize, weight
from tests import reference
from tests.snippets import ROOT, programs, ran

PAGE = (ROOT / "docs/quantised.md").read_text()
ROWS = {name: cells for row in re.findall(r"^\| (`.*)\|$", PAGE, re.M) for name, *cells in [row.split("|")]}


def test_the_programs(monkeypatch):
    monkeypatch.setattr(weight, "KINDS", dict(weight.KINDS))
    first, second = (ran(program, "docs/quantised.md") for program in programs("docs/quantised.md"))
    W, A, B, m, x = (first[name] for name in ("W", "A", "B", "m", "x"))
    assert torch.equal(first["y"], x @ W.dequantize().T)  # B = 0
    assert first["packed"].spec == W.spec and 0 <= first["error"] < 1e-4  # B = 0
    assert first["merged"].shape == (48, 64) and B.grad.abs().sum() > 0 and m.grad.abs().sum() > 0 and A.grad is not None
    assert second["c"].shape == (48,) and second["c"].isfinite().all()
    dense = second["W"].dequantize()
    assert torch.equal(dense, second["W"].tensors[0].float() * 0.5)
    c = second["dora_norm"](second["W"], torch.ones(8, 64), torch.ones(48, 8), s=1.0)
    torch.testing.assert_close(c.double(), reference.norm(dense, torch.ones(8, 64), torch.ones(48, 8), 1.0), rtol=1e-6, atol=0)


def test_errors_of_8_bit_products():
    """The table in bench/NOTES.md, at an eighth of its size, and the largest of it on the page."""
    from bench.fp8_error import INPUTS, SCALES, errors

    notes = (ROOT / "bench/NOTES.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| ([\w ]+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", notes, re.M)
    assert [row[:2] for row in rows] == [(kind, scale) for kind in INPUTS for scale in SCALES]
    for kind, scale, *said in rows:
        found = errors(scale, kind, 128, 256, 2048, 16)
        for number, each in zip(said, found.values(), strict=True):
            assert 100 * each == pytest.approx(float(number), rel=0.25), (kind, scale, found)


def test_an_outlier_costs_the_others_nothing_and_depth_adds_up():
    """What bench/NOTES.md says: a token's largest element is a code exactly; errors of layers are independent."""
    from bench.fp8_error import by_depth, with_outlier

    torch.manual_seed(0)
    few, many = (with_outlier("row", times, 128, 256, 1024, 8)["fp8"] for times in (1, 100))
    assert 0.02 < few < 0.03 and many < 1.1 * few
    rows = {(row["way"], row["layers"]): row for row in by_depth(4, 64, 128, 192, 4)}
    assert 1.6 < rows["fp8", 4]["h"] / rows["fp8", 1]["h"] < 2.4 and rows["bf16", 4]["h"] < rows["fp8", 1]["h"]
    assert all(rows["fp8 both ways", i]["dB"] > rows["fp8", i]["dB"] > 3 * rows["bf16", i]["dB"] for i in range(1, 4))


def formats():
    """Rows of another weight are a kind, and no format."""
    return weight.KINDS.keys() - {part.KIND}


def test_every_kind_has_a_row():
    assert set(re.findall(r"`(\w+)`", " ".join(ROWS))) == formats()


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("nf4", {}, "0.5625 in groups of 64"),
        ("nf4", {"nested": True}, "0.516 with nested scales"),
        ("mxfp4", {}, "0.531"),
        ("nvfp4", {}, "0.5625"),
        ("int8", {}, "1 and a scale for each row"),
    ],
)
def test_bytes_per_weight(kind, options, said):
    W = quantize(torch.randn(1024, 1024), kind, **options)
    (cells,) = (cells for name, cells in ROWS.items() if f"`{kind}`" in name)
    assert said in cells[1]
    number = float(said.split()[0])
    assert W.nbytes / 2**20 == pytest.approx(number, rel=5e-3)


def test_errors_are_those_that_the_command_finds():
    """The page rounds to one digit, and another order of summation moves float32's last bit."""
    found = quant_error.figures()
    assert found.keys() == formats()
    said = {tuple(re.findall(r"`(\w+)`", name)): [float(cell) for cell in cells[-3:]] for name, cells in ROWS.items()}
    for names, errors in said.items():
        for i, error in enumerate(errors):
            assert max(found[name][i + 1] for name in names) == pytest.approx(error, rel=0.6)
    assert [line.count("|") for line in quant_error.written(PAGE, found).splitlines()] == [
        n.count("|") for n in PAGE.splitlines()
    ]
