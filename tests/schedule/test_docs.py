"""docs/training-many.md keeps its word about schedules: programs one after the other, then the command."""

import json
import re

import pytest

from fdora.jobs.schedule import from_json, optimizer_steps, segment_ends
from fdora.jobs.schedule.__main__ import main
from tests.snippets import ROOT, programs, ran

TEXT = (ROOT / "docs/training-many.md").read_text()


def test_the_programs(capsys):
    space = {}
    for program in programs("docs/training-many.md")[1:]:  # behind the PEFT model's
        ran(program, "docs/training-many.md", space)
    found, out = space["found"], capsys.readouterr().out
    assert f"{len(found.microbatches)} {found.bound} {found.noops} {found.fill:.0%}" in out
    assert sum(space["times"]) > space["together"].time and found.noops == 0
    due = optimizer_steps(found.microbatches)
    assert sum(map(len, due)) == 6 and segment_ends(found.microbatches[0], adapters=3)[-1] > 0


def test_the_command(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's; `make test` installs it")
    monkeypatch.chdir(tmp_path)
    (lengths,) = re.findall(r"`(\{.*\})`", TEXT)
    (tmp_path / "lengths.json").write_text(lengths)
    (command,) = re.findall(r"^fdora schedule (.*)$", TEXT, re.M)
    assert main(command.split()) == 0 and "law" in capsys.readouterr().out
    tokens = sum(n for batches in json.loads(lengths).values() for batch in batches for n in batch)
    assert from_json((tmp_path / "schedule.json").read_text()).tokens == tokens and (tmp_path / "schedule.png").exists()


def test_it_names_every_function():
    import fdora.jobs.schedule as schedule

    functions = {name for name in schedule.__all__ if name[0].islower()} - {"one_f_one_b", "interleaved"}
    assert not [name for name in functions if not re.search(rf"`{name}\b|import.*\b{name}\b", TEXT)]
