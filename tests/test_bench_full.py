"""bench.full in small, on the CPU: what it writes, and that it sees a wrong gradient."""

import pytest

from bench import full, records


def test_full(tmp_path):
    full.main(["--tiny", "--runs", "1", "--json", str(tmp_path / "a.json"), "--commit", "abc"])
    result = records.load(tmp_path / "a.json")
    assert result["about"]["commit"] == "abc" and [row["norm"] for row in result["rows"]] == ["inside", "given"]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["full_ms"] / row["detached_ms"], rel=0.01) and row["error"] < full.MOST_APART


def test_full_sees_a_gradient_that_stops_at_the_norm(monkeypatch):
    stock = full.step
    monkeypatch.setattr(full, "step", lambda i, detach, given: stock(i, True, given))
    with pytest.raises(AssertionError, match="detach=False"):
        full.main(["--tiny", "--runs", "1"])
