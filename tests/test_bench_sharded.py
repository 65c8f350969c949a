"""bench.sharded in small: two processes with gloo; what it writes, and that it looks at the numbers before it times anything."""

import json

import pytest

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
from bench import records, sharded


def test_sharded(tmp_path):
    path = tmp_path / "result.json"
    ways = ("peft_lora", "peft_dora", "peft_fdora", "peft_fdora_fused_shards")
    sizes = "--tiny --layers 1 --seq 16 --loss-tokens 4 --r 4 --runs 1 --modes step --dtype fp32 --adapter fp32"
    sharded.main([*sizes.split(), "--ways", ",".join(ways), "--json", str(path), "--commit", "abc"])
    result = records.load(path)
    assert result["about"]["commit"] == "abc" and result["failed"] == {}
    assert [row["way"] for row in result["rows"]] == list(ways)
    assert all(row["ms"] > 0 and row["peak_mb"] > 0 and set(row["issue_ms"]) == set(sharded.PARTS) for row in result["rows"])
    assert set(result["agreement"]) == set(ways[2:])
    assert all(error < 1e-5 for found in result["agreement"].values() for error in found.values())
    assert all(set(calls) == {"fused"} for calls in result["paths"].values())
    assert len({json.dumps(counts) for counts in result["collectives"].values()}) == 1  # those of LoRA


def test_tensor_parallel(tmp_path):
    path = tmp_path / "result.json"
    sizes = "--layout tp --tiny --layers 1 --seq 16 --loss-tokens 4 --r 4 --runs 1 --modes step --dtype fp32 --adapter fp32"
    sharded.main([*sizes.split(), "--json", str(path)])
    result = records.load(path)
    assert result["failed"] == {} and [row["way"] for row in result["rows"]] == ["peft_lora", "peft_fdora"]
    assert set(result["agreement"]) == {"peft_fdora"}
    assert all(error < 1e-5 for error in result["agreement"]["peft_fdora"].values())
    assert set(result["paths"]["peft_fdora"]) == {"fused"}
