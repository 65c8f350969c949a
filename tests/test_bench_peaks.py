"""bench.peaks and bench.profile_gpu in small, on a CPU: what they write."""

import json

import pytest

pytest.importorskip("peft", reason="both train PEFT's models; `make test` installs it")
from bench import peaks, profile_gpu
from fdora.jobs.plan import Profile, card, read_model
from tests.test_bench import run


def test_peaks(tmp_path):
    sizes = "--tiny --layers 1 --r 4 --cases fp32:2x16:4 --models qwen2.5-7b --ways fuse --runs 1"
    result = run(peaks, tmp_path, sizes)
    assert result["failed"] == {} and result["skipped"] == []
    assert [row["checkpointing"] for row in result["rows"]] == [False, True]
    for row in result["rows"]:
        assert row["bytes"]["peak"] > row["bytes"]["kept"] > 0 and row["ms"] > 0
        assert row["weights"] > 0 and row["optimizer"] == 2 * row["adapters"] > 0
        assert (row["sequences"], row["length"], row["loss_tokens"]) == (2, 16, 4) and row["attention"].startswith("Scaled")
        assert read_model(row["config"]).kind == "qwen2"
    assert result["rows"][0]["bytes"]["kept"] > result["rows"][1]["bytes"]["kept"]


def test_profile(tmp_path):
    path = tmp_path / "h200.json"
    path.write_text(json.dumps({"gpu": "h200", "profile": {"gather": 5.0, "flops": 1.0}}))
    profile_gpu.main(["--gpu", "h200", "--small", "32", "--runs", "1", "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["profile"]["gather"] == 5.0 and found["profile"].keys() == set(Profile._fields) - {"send"}
    assert found["profile"]["flops"] != 1.0 and card("h200", path).measured
