"""docs/predict.md keeps its word about plans: programs one after the other, then the command."""

import json
import re

import pytest

from fdora.jobs.plan import Adapter, Setup, capacity, read_model
from fdora.jobs.plan.__main__ import main
from fdora.jobs.plan.model import FAMILIES
from tests.snippets import ROOT, programs, ran

for package in ("transformers", "triton"):
    pytest.importorskip(package, reason="a plan records with it; `make test` installs it")
TEXT = (ROOT / "docs/predict.md").read_text()


def test_the_programs_and_the_command(tmp_path, monkeypatch, capsys):
    space = {}
    for program in programs("docs/predict.md")[1:]:  # the first is `explain`'s
        ran(program, "docs/predict.md", space)
    out, found = capsys.readouterr().out, space["found"]
    said = re.findall(r": ([\d.]+) GiB, of which .*; (\d+) tokens in 76 GiB", out)
    peaks, tokens = [float(peak) for peak, _ in said], [int(most) for _, most in said]
    assert peaks[0] > peaks[1] > peaks[2] and tokens[0] < tokens[1] < tokens[2]
    assert found.best == found.layouts[0] and out.count("True") + out.count("False") >= 2 * len(found.layouts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(space["config"]))
    (command,) = re.findall(r"^fdora plan (.*)$", TEXT, re.M)
    assert main(command.split()) == 0 and "Best: " in capsys.readouterr().out
    assert [each["name"] for each in json.loads((tmp_path / "plan.json").read_text())["setup"]["adapters"]] == ["law", "med"]


def test_which_card_for_which_model():
    """The table of docs/faq.md, by the planner."""
    sizes = {"Llama-3.1-8B": (32, 4096, 14336, 32, 128256), "Qwen2.5-32B": (64, 5120, 27648, 40, 152064)}
    sizes["Llama-3.1-70B"] = (80, 8192, 28672, 64, 128256)
    rows = re.findall(r"^\| ([\w.-]+) \| (bf16|NF4) \| (.*) \|$", (ROOT / "docs/faq.md").read_text(), re.M)
    assert len(rows) == 2 * len(sizes)
    for name, weights, said in rows:
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        config = dict(zip(names, sizes[name], strict=True)) | {"num_key_value_heads": 8, "tie_word_embeddings": False}
        model = read_model(config | {"model_type": "qwen2" if "Qwen" in name else "llama"})
        setup = Setup(2048, (Adapter("a", 16),), fuse=True, checkpointing=True, loss_tokens=1, weights=weights.lower())
        found = [capacity(model, setup, budget=int(0.94 * card * 2**30)) for card in (24, 48, 80)]
        assert said.split(" | ") == [str(tokens or "no") for tokens in found]


def test_model_types():
    (line,) = re.findall(r"^- Model types: (.*?)\. Mixtures", TEXT, re.M)
    assert line.replace("`", "").split(", ") == [*FAMILIES]
