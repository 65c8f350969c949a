"""docs/adapters.md keeps its word: its programs, one after the other."""

import re

import pytest
import torch

from tests.test_layers import ROOT

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters.md").read_text(), re.S)


def test_the_programs(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="the last is PEFT's; `make test` installs it")
    monkeypatch.chdir(tmp_path)
    from safetensors.torch import load_file

    space = {}
    for program in PROGRAMS:
        exec(compile(program, "docs/adapters.md", "exec"), space)
    assert len(PROGRAMS) == 7 and space["adapters"][0].m.grad.abs().sum() > 0
    assert space["y"].shape == (3, 10, 48)
    (bank,) = space["banks"].values()
    files = {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "adapters/training.safetensors").exists()
    for name in ("law", "med"):
        assert {path.name for path in (tmp_path / "adapters" / name).iterdir()} >= files
    read = space["load"]("adapters", space["start"], space["jobs"], space["keep"])
    assert read.steps == (2, 1) and torch.equal(read.params[space["path"]].A, space["state"].params[space["path"]].A)
    stored = load_file("adapters/med/adapter_model.safetensors")
    assert torch.equal(stored["base_model.model.0.lora_A.weight"], read.params[space["path"]].A[1, :4])
    assert bank.adapters == ("law", "med") and bank.ranks == (8, 4) and bank.params.m.shape == (2, 48)
