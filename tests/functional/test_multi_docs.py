"""docs/serving.md and docs/training-many.md keep their word, and examples/many_adapters.py runs."""

import os
import subprocess
import sys

import pytest
import torch

from tests.snippets import ROOT, programs, ran


def run(page):
    space = {"__name__": "docs"}
    for program in programs(page):
        ran(program, page, space)
    return space


def test_serving():
    pytest.importorskip("peft", reason="the last program is PEFT's; `make test` installs it")
    space = run("docs/serving.md")
    assert space["y"].shape == (3, 10, 48)


def test_training(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")
    monkeypatch.chdir(tmp_path)
    from safetensors.torch import load_file

    first = run("docs/training-many.md")
    (bank,) = first["banks"].values()
    files = {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "adapters/training.safetensors").exists()
    for name in ("law", "med"):
        assert {path.name for path in (tmp_path / "adapters" / name).iterdir()} >= files
    read = first["load"]("adapters", first["start"], first["jobs"], first["keep"])
    assert read.steps == (2, 1) and torch.equal(read.params[first["path"]].A, first["state"].params[first["path"]].A)
    stored = load_file("adapters/med/adapter_model.safetensors")
    assert torch.equal(stored["base_model.model.0.lora_A.weight"], read.params[first["path"]].A[1, :4])
    assert bank.adapters == ("law", "med") and bank.ranks == (8, 4) and bank.params.m.shape == (2, 48)


def test_the_example(tmp_path):
    """Replicas and the pipeline, as torchrun starts them: it compares with one process itself."""
    pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/many_adapters.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "adapters/training.safetensors").exists() and (tmp_path / "adapters/law").is_dir()
