"""`make demo-multi` in small: a random encoder, so that nothing is wanted but transformers."""

import json
import math

import pytest

pytest.importorskip("transformers", reason="the demo's encoder is its; `make test` installs it")
pytest.importorskip("tqdm", reason="`make test` installs the demo")
pytest.importorskip("matplotlib", reason="the picture is its; `make test` installs it")
SMALL = ["--random", "--steps", "2"]


def test_alone_together_and_as_a_pipeline(tmp_path, capsys):
    from demo import multi

    assert multi.main([*SMALL, "--out", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["multi.json", "schedule.png"]
    report, out = json.loads((tmp_path / "multi.json").read_text()), capsys.readouterr().out
    assert set(report["loss"]) == {"alone", "together", "pipeline"} and report["apart"].keys() == {"together", "pipeline"}
    for way in report["loss"].values():
        assert [len(losses) for losses in way] == [2, 2, 2, 2]
    assert report["loss"]["together"] == report["loss"]["pipeline"]  # the same functions on the same microbatches
    assert 0 < report["apart"]["together"] <= report["tolerance"] == 1e-5  # a loop of its own, so not the same bits
    ranks = [job["r"] for job in report["jobs"].values()]
    assert len(set(ranks)) == 4 and all(name in out for name in report["jobs"]) and "pipeline of two" in out


def test_curves_that_part_fail_the_command(tmp_path, capsys, monkeypatch):
    from demo import multi, together

    def parted(setting, world, plan):
        losses, _ = together.together(setting, world, plan)
        losses[2][1] += 3e-5
        return losses, 0.0

    monkeypatch.setattr(together, "pipelined", parted)
    assert multi.main([*SMALL, "--out", str(tmp_path)]) == 1
    assert "3.0e-05 apart, more than 1e-05" in capsys.readouterr().err
    assert math.isnan(multi.apart([[1.0, math.nan]], [[1.0, 2.0]])) and math.isnan(multi.apart([[1.0, math.nan]], [[2.0, 2.0]]))


def test_the_texts_are_four_kinds_and_the_same_each_time(tmp_path):
    from demo.corpora import KINDS, PACKAGES, load_corpora
    from demo.data import DataError

    corpora = load_corpora(dict.fromkeys(KINDS, 200))
    assert load_corpora({"messages": 200})["messages"] == corpora["messages"] and {
        len(texts) for texts in corpora.values()
    } == {200}
    for texts in corpora.values():
        assert len({t.text for t in texts}) == 200 and {t.label for t in texts} <= set(range(len(PACKAGES)))
    assert all(t.text.startswith("def ") for t in corpora["signatures"])
    with pytest.raises(DataError, match=f"needs 1 comments of asyncio, .* but {tmp_path} holds 0"):
        load_corpora({"comments": 1}, tmp_path)
