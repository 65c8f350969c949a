"""bench.parallel in small: two processes with gloo; every way is compared with one process before it is timed."""

from bench import parallel, records


def test_parallel(tmp_path):
    path = tmp_path / "result.json"
    sizes = "--tiny --runs 1 --M 8 --r 4 --layers 1 --dtype fp32 --commit abc"
    parallel.main([*sizes.split(), "--json", str(path)])
    result = records.load(path)
    assert result["about"]["commit"] == "abc"
    assert [(row["cut"], *row["errors"]) for row in result["layers"]] == [
        ("rows", "fdora", "fdora_dtensor"),
        ("columns", "fdora", "fdora_dtensor"),
    ]
    assert all(error < 1e-6 for row in result["layers"] for error in row["errors"].values())
    assert all(ms > 0 for row in result["layers"] for kind in ("forward", "both") for ms in row[kind].values())
    assert all(row["error"] < 1e-6 and row["1"] > 0 and row["world"] > 0 for row in result["norms"])
