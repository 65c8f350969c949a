"""examples/ keep their word: scripts train a small model on a CPU, and the notebook runs from above to below.

``python -m tests.test_examples`` writes what the notebook's cells print into it.
"""

import contextlib
import io
import json
import runpy
import sys

import pytest
import torch

from tests.test_layers import ROOT

FOLDER = ROOT / "examples"
NOTEBOOK = FOLDER / "tour.ipynb"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs a script with --tiny for ten steps; what it defines, and where it wrote."""

    def run(name):
        for needed in ("datasets", "peft", "trl", "bitsandbytes", "diffusers"):
            pytest.importorskip(needed, reason=f"{needed} is not installed; `make test` installs it")
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.delitem(sys.modules, "tiny", raising=False)
        monkeypatch.setattr(sys, "argv", [name, "--tiny", "--steps", "10", "--out", str(tmp_path / "out")])
        return runpy.run_path(str(FOLDER / name), run_name="__main__"), tmp_path / "out"

    return run


def test_every_script_is_short():
    assert all(len(path.read_text().splitlines()) < 80 for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("name", ["sft_trl.py", "qdora.py"])
def test_trl_trains_and_saves_pefts_adapter(name, trained, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    space, out = trained(name)
    assert space["losses"][-1] < 0.95 * space["losses"][0]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("base_model.")]
    assert len(rows) == 14
    for *_, backend, fused, composed, stock in (row[:8] for row in rows):
        assert backend == "eager" and int(fused) > 0 and composed == stock == "0"
    saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out / "base"), out)
    assert sum("lora_magnitude_vector" in key for key in saved.state_dict()) == 14


def test_a_layer_of_ones_own_learns_and_merges(trained, capsys):
    from safetensors.torch import load_file

    _, out = trained("own_layer.py")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < 0.9 * losses[0]
    base, merged = (load_file(out / folder / "model.safetensors") for folder in ("base", "merged"))
    adapter = {key: p.double() for key, p in load_file(out / "adapter.safetensors").items()}
    paths = {key.removesuffix(".A") for key in adapter if key.endswith(".A")}
    assert merged.keys() == base.keys() and len(paths) == 14
    for path in paths:
        A, B, m = (adapter[f"{path}.{key}"] for key in "ABm")
        dense = base[f"{path}.weight"].double() + 2.0 * B @ A
        dense *= (m / dense.norm(dim=1))[:, None]
        torch.testing.assert_close(merged[f"{path}.weight"], dense.float())


def test_dreambooth_learns_and_saves_a_file_of_diffusers(trained, capsys):
    from diffusers import StableDiffusionXLPipeline

    from fdora.convert import read

    space, out = trained("dreambooth.py")
    printed = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in printed if line.startswith("step")]
    there = read(out, "diffusers")
    rows = [line.split() for line in printed if line.partition(" ")[0] in there]
    assert len(losses) == 10 and len(there) == len(rows) == 32
    for path, *_, fused, composed, stock in (row[:8] for row in rows):  # on a CPU a bias is added after the call
        assert stock == "0" and int(composed if path.endswith("to_out.0") else fused) > 0, path
    latents = space["latents"]
    text, pooled, sizes = (space[name].expand(4, *space[name].shape[1:]) for name in ("text", "pooled", "sizes"))
    noise, time = torch.randn_like(latents), torch.tensor([100, 300, 500, 700])
    x = space["scheduler"].add_noise(latents, noise, time), time, text
    more = {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": sizes}}
    again = StableDiffusionXLPipeline.from_pretrained(out / "base")
    with torch.no_grad():
        want, before = space["unet"](*x, **more).sample, again.unet(*x, **more).sample
        again.load_lora_weights(out)
        torch.testing.assert_close(again.unet(*x, **more).sample, want)
    assert (want - noise).square().mean() < 0.97 * (before - noise).square().mean()


def ran(cells):
    """What each cell of code prints, in one namespace."""
    space = {"__name__": "__main__"}
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {cell['execution_count']}", "exec"), space)
        yield said.getvalue()


def test_the_notebook_runs_and_shows_what_it_prints():
    """That every cell prints, and that the file has something for it: figures and words change with versions."""
    pytest.importorskip("peft", reason="one of its models is PEFT's; `make test` installs it")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(said and cell["outputs"] for said, cell in zip(ran(cells), cells, strict=True))


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, said in zip(cells, ran(cells), strict=True):
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": said.splitlines(keepends=True)}]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")
