"""bench.all: which results it makes, that one failure stops nothing, and what is said of a result that is not whole."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from bench import all as everything
from bench import records
from bench.all import Entry

FAKE = """
import argparse
from bench import records
parser = argparse.ArgumentParser()
for name in ("--device", "--json", "--commit", "--seconds", "--do"):
    parser.add_argument(name)
options = parser.parse_args()
def write(**result):
    records.save(options.json, {"about": {"commit": options.commit}, "seconds": options.seconds} | result)
if options.do == "broken":
    print("on the way")
    raise RuntimeError("out of luck")
write(rows=[{"M": 1}], skipped=[2] if options.do == "late" else [])
if options.do == "wrong":
    raise SystemExit("fdora is wrong")
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Entries that do what their name says, run as everything.main runs the real ones."""
    (tmp_path / "fake_bench.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    table = {name: Entry(0, f"fake_bench --do {name}") for name in ("broken", "good", "wrong", "late")}
    monkeypatch.setattr(everything, "TABLE", table)
    out = tmp_path / "out"

    def main(*arguments, names):
        everything.main(["--out", str(out), "--commit", "abc", "--only", names, *arguments])

    main.result = lambda name: records.load(out / "fake_bench.jsonl", f"cpu/{name}")
    main.files = lambda: sorted(name.removeprefix("cpu/") for name in records.read(out / "fake_bench.jsonl"))
    return main


def test_what_fails_is_reported_and_the_rest_goes_on(fakes, capsys):
    with pytest.raises(SystemExit, match=r"failed: broken, wrong$"):
        fakes(names="wrong,good,late,broken")
    out = capsys.readouterr().out
    assert re.search(r"broken: \d+ s, exit status 1, its last lines:\non the way\n(.*\n)*RuntimeError: out of luck\n", out)
    assert re.search(r"good: \d+ s\n", out) and "fdora is wrong" in out
    assert re.findall("not run: .*", out) == ["not run: late (some cases were not started)"]
    assert fakes.files() == ["good", "late", "wrong"]
    assert fakes.result("good") == {"about": {"commit": "abc"}, "seconds": None, "rows": [{"M": 1}], "skipped": []}
    assert fakes.result("wrong")["problem"] == "exit status 1"
    fakes("--missing", "--list", names="wrong,good,late,broken")
    rows = re.findall(r"^\| (\w+) \| \d.*\| ([\w -]*) \|$", capsys.readouterr().out, re.M)
    assert dict(rows) == {"late": "some cases were not started", "wrong": "exit status 1", "broken": "no result"}


def test_a_failure_leaves_an_older_result_alone(fakes):
    fakes(names="good")
    everything.TABLE["good"] = Entry(0, "fake_bench --do broken")
    with pytest.raises(SystemExit, match="failed: good"):
        fakes(names="good")
    assert "problem" not in fakes.result("good")


def test_real_commands(tmp_path, capsys):
    """One that runs on a CPU, and one that cannot."""
    with pytest.raises(SystemExit, match="failed: study_timeline"):
        everything.main(["--out", str(tmp_path), "--commit", "abc", "--only", "study_timeline,compose", "--seconds", "1e9"])
    assert "timeline wants a GPU" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["compose.jsonl"]
    result = records.load(tmp_path / "compose.jsonl", "cpu/compose")
    assert result["about"]["commit"] == "abc" and len(result["rows"]) == 2


def test_every_committed_result_has_its_command():
    committed = {path.stem: [name.split("/")[1] for name in records.read(path)] for path in records.RESULTS.glob("*.jsonl")}
    searches = committed.pop("tune")  # of results that are there, and of tiles
    assert "fit" in searches and {"bias", "beside"} <= {*committed["gone"]}  # of a pass and of commands that are gone
    assert committed.pop("against") == ["against"] * 2  # it wants another checkout; one run on each GPU
    assert not set(committed.pop("gone")) & set(everything.TABLE)
    assert {name for names in committed.values() for name in names} <= set(everything.TABLE)
    with pytest.raises(SystemExit):
        everything.parse(["--only", "norm_form"])


def test_commands_take_their_arguments(tmp_path, monkeypatch):
    """Those that can be asked: nothing is run."""
    pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
    from bench import model

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "ARCHITECTURES", {"qwen3-vl-8b": None} | model.ARCHITECTURES)
    options = everything.parse(["--device", "cuda", "--commit", "abc", "--rival-path", f"{tmp_path},{tmp_path}"])
    asked = {}
    for name, entry in everything.TABLE.items():
        module = importlib.import_module(entry.command.split()[0])
        parse = getattr(module, "parse", None) or getattr(module.main, "parse", None) if hasattr(module, "main") else None
        if parse and name != "schedule":  # of a CPU alone
            command = everything.arguments(name, everything.Place(tmp_path / "x", "run"), "", options, 500.0)
            asked[name] = parse(command[3:])
            assert asked[name].device == "cuda"
            assert name == "demo" or (asked[name].commit, asked[name].json) == ("abc", tmp_path / "x:run")
    assert asked["group"].seconds == asked["layer_few"].seconds == asked["converge_s2"].seconds == 500 - everything.LAST_CASE
    assert str(tmp_path) in str(asked["layer_quick"].rival_path) and asked["converge_muon_s2"].seeds == [2]
    assert {each.model for name, each in asked.items() if name.startswith(("model_", "trainer_"))} == set(model.ARCHITECTURES)
    assert {each.sweep for name, each in asked.items() if name.startswith("model_")} == {None, *model.SWEEPS}


def test_a_result_is_whole_or_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "a" / "x.jsonl"
    records.save(path, {"rows": [{"M": 1}]})
    whole = Path.write_text

    def killed(path, text):
        whole(path, text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        records.save(path, {"rows": [{"M": 1}, {"M": 2}]})
    assert records.load(path) == {"rows": [{"M": 1}]}
    records.save(None, {"rows": []})
