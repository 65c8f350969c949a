"""docs/serving.md and docs/training-many.md keep their word, and examples/many_adapters.py runs."""

import pytest
import torch

from tests.process import torchrun
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


def written(folder):
    """That PEFT's folders are there; the training's own file, and the tensors of med."""
    from safetensors.torch import load_file

    for name in ("law", "med"):
        assert {path.name for path in (folder / name).iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    return load_file(folder / "training.safetensors"), load_file(folder / "med/adapter_model.safetensors")


def test_training(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")
    monkeypatch.chdir(tmp_path)
    space = run("docs/training-many.md")
    trained, stored = space["trained"], written(tmp_path / "run")[1]
    assert {name: len(each) for name, each in trained.losses.items()} == {"law": 4, "med": 3}
    assert list(trained.evaluations["law"]) == [4] and space["jobs"][1].job.name == "med"
    for name, t in stored.items():
        own = space["model"].get_parameter(name.replace(".weight", ".med.weight"))
        assert torch.equal(t, own) and t.any()


def test_the_example(tmp_path):
    """Replicas and the pipeline, as torchrun starts them: it compares with one process itself."""
    pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")
    torchrun(ROOT / "examples/many_adapters.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    whole, stored = written(tmp_path / "adapters")
    (A,) = (t for key, t in whole.items() if key.startswith("params/") and t.shape == (2, 8, 64))
    assert torch.equal(stored["base_model.model.0.lora_A.weight"], A[1, :4])
