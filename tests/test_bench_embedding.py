"""bench.embedding runs on a CPU, and what it says."""

from bench import embedding, records


def test_it_runs_and_saves_what_it_measured(tmp_path, capsys):
    embedding.main(["--runs", "1", "--tokens", "8,16", "--json", str(tmp_path / "e.json"), "--commit", "abc"])
    out = capsys.readouterr().out
    result = records.load(tmp_path / "e.json")
    assert result["about"]["commit"] == "abc" and [row.get("T") for row in result["rows"]] == [8, 16, None, None]
    ops = {
        "embedding": ("gather", "lora", "peft", "eager", "fdora", "fdora_per_row"),
        "conv2d": ("frozen", "halves", "peft", "fdora"),
    }
    for row in result["rows"]:
        times = {key: value for key, value in row.items() if key.endswith("_ms")}
        assert {f"fwd_{way}_ms" for way in ops[row["op"]]} <= times.keys() and all(ms > 0 for ms in times.values())
        assert f"| {row['op']} |" in out and "fwd_bwd_fdora_ms" in times


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(embedding, "truth", lambda ids, W, *_: (ids, W[ids].double()))
    try:
        embedding.main(["--runs", "1", "--tokens", "8", "--only", "embedding"])
    except AssertionError as error:
        assert "is wrong by" in str(error)
    else:
        raise AssertionError("nobody noticed")
