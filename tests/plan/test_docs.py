"""docs/predict.md keeps its word about plans: programs one after the other, then the command."""

import json
import re

from fdora.jobs.plan.__main__ import main
from fdora.jobs.plan.model import FAMILIES
from tests.test_layers import ROOT

TEXT = (ROOT / "docs/predict.md").read_text()


def test_the_programs_and_the_command(tmp_path, monkeypatch, capsys):
    space = {}
    for program in re.findall(r"```python\n(.*?)```", TEXT, re.S)[1:]:  # the first is `explain`'s
        exec(compile(program, "docs/predict.md", "exec"), space)
    out, found = capsys.readouterr().out, space["found"]
    said = re.findall(r": ([\d.]+) GiB, of which .*; (\d+) tokens in 76 GiB", out)
    peaks, tokens = [float(peak) for peak, _ in said], [int(most) for _, most in said]
    assert peaks[0] > peaks[1] > peaks[2] and tokens[0] < tokens[1] < tokens[2]
    assert found.best == found.layouts[0] and out.count("True") + out.count("False") >= 2 * len(found.layouts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(space["config"]))
    (command,) = re.findall(r"^python -m fdora.jobs.plan (.*)$", TEXT, re.M)
    assert main(command.split()) == 0 and "Best: " in capsys.readouterr().out
    assert [each["name"] for each in json.loads((tmp_path / "plan.json").read_text())["setup"]["adapters"]] == ["law", "med"]


def test_model_types():
    (line,) = re.findall(r"^- Model types: (.*?)\. Mixtures", TEXT, re.M)
    assert line.replace("`", "").split(", ") == [*FAMILIES]
