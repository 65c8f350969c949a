"""docs/conversion.md runs as it stands: its programs one after the other, then its commands."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import fdora.convert
from fdora.convert import merge, read, write
from fdora.convert.__main__ import main
from tests.convert.make import layer, missed, target
from tests.snippets import ROOT, programs, ran

TEXT = (ROOT / "docs/conversion.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
    layers = {path: layer(N=64, K=48, seed=i) for i, path in enumerate(paths)}
    (tmp_path / "model").mkdir()
    save_file({f"{path}.weight": W for path, (W, _) in layers.items()}, "model/model.safetensors")
    write("one", {path: p for path, (_, p) in layers.items()})
    write("other", {path: layer(N=64, K=48, seed=7 + i)[1] for i, path in enumerate(paths)})
    return tmp_path


def test_programs_and_commands(folder, capsys):
    space = {}
    for program in programs("docs/conversion.md"):
        ran(program, "docs/conversion.md", space)
    W, p, q = (space[n] for n in "Wpq")
    want = target(W, [p, q], [0.7, 0.3])
    assert missed(W, merge(W, space["both"]), want) < 1e-5
    assert 0.01 < space["error"] < 1 and len(space["lora"].A) == 16
    assert all(torch.equal(a.m, b.m) for a, b in zip(read("again").values(), space["one"].values(), strict=True))
    assert torch.equal(load_file("one/g.safetensors")[f"base_model.model.{space['path']}.g"], space["g"])

    commands = re.findall(r"^fdora convert (.*)$", TEXT, re.M)
    assert len(commands) == 5
    for command in commands:
        main(command.split())
    assert read("out").keys() == read("lora").keys() == space["one"].keys()


def test_every_name_in_it_exists():
    called = set(re.findall(r"`(\w+)\(", TEXT)) - {"diag", "add_weighted_adapter", "dora_norm"}
    assert called <= set(fdora.convert.__all__), called - set(fdora.convert.__all__)
    assert {n for n in fdora.convert.__all__ if n not in TEXT} <= {
        "from_torchtune",
        "to_torchtune",
        "from_peft",
        "llama_to_torchtune",
    }
