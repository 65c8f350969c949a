"""bench.experts in small, on the CPU: what it writes, and that it sees a wrong result."""

import pytest

from bench import experts, experts_case, records
from fdora.functional import dora_experts_mlp

SMALL = "--models tiny --T 24 --r 8 --runs 1 --loop-ms 0 "


def run(tmp_path, options):
    path = tmp_path / "result.json"
    experts.main([*(SMALL + options).split(), "--json", str(path), "--commit", "abc"])
    result = records.load(path)
    assert result["about"]["commit"] == "abc" and result["skipped"] == []
    return result["rows"]


def test_every_case(tmp_path, capsys):
    rows = run(tmp_path, "--ways loop,lora_grouped,fdora")
    trained = [(kind, mode) for kind in ("mlp", "layer") for mode in ("fwd", "fwd_bwd")]
    assert [(row["kind"], row["mode"]) for row in rows] == [*trained, ("norm", "norm")]
    for row in rows:
        ways = {"loop", "tree", "fdora"} if row["kind"] == "norm" else {"loop", "lora_grouped", "fdora"}
        assert set(row["ms"]) == set(row["wall"]) == ways - set(row["failed"]) and not {"loop", "fdora"} & set(row["failed"])
        assert max(row["error"]["fdora"].values()) < 1e-2
        assert row["ratio"]["fdora/loop"] == pytest.approx(row["ms"]["fdora"] / row["ms"]["loop"], rel=0.05, abs=2e-3)
        names = {"mlp": {"y", "dx", "dgates"}, "layer": {"y", "dx", "dA_up", "dB_up", "dm_up"}, "norm": {"c"}}[row["kind"]]
        assert set(row["error"]["fdora"]) == names and (row["kind"] == "norm" or row["kept"]["fdora"] > 0)
    assert "| mlp tiny T=24 r=8, fwd |" in capsys.readouterr().out


def test_a_wrong_result_is_seen(tmp_path, monkeypatch):
    def wrong(x, *layers, **given):
        return 1.1 * dora_experts_mlp(x, *layers, **given)

    monkeypatch.setattr(experts_case, "dora_experts_mlp", wrong)
    with pytest.raises(SystemExit, match=r"fdora is wrong: y by 1"):
        run(tmp_path, "--ways fdora")
    rows = records.load(tmp_path / "result.json")["rows"]
    assert all("fdora" not in row["ms"] for row in rows if row["kind"] == "mlp")  # no time for a wrong result
