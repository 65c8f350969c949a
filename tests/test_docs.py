"""The README keeps its word: its programs run and do what they say, its commands exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.S)


def run(number):
    space = {"__name__": "readme"}
    exec(compile(PROGRAMS[number - 1], f"README.md program {number}", "exec"), space)
    return space


def test_there_are_four():
    assert [p.split(".")[0] for p in PROGRAMS] == ["# 1", "# 2", "# 3", "# 4"]


def test_program_1_changes_nothing_at_the_start():
    out = run(1)
    assert torch.equal(out["y"], out["x"] @ out["W"].T)


def test_program_2_gives_a_gradient_per_token_and_a_loss_per_adapter():
    out = run(2)
    whole = torch.func.grad(out["loss"])(out["params"], out["x"], out["t"])
    for k, p in whole.items():
        for d, ds in zip(p, out["per_sample"][k], strict=True):
            torch.testing.assert_close(ds.mean(0), d)
    assert out["losses"].shape == (2,) and out["losses"][0] == out["losses"][1]


def test_program_3_is_pefts_model(capsys):
    from fdora.integrations.peft import report, use_fdora

    space = run(3)
    model = space["model"]
    table = capsys.readouterr().out
    assert "base_model.model.0" in table and "48x64" in table and "eager" in table
    assert all(row.backend == "stock" for row in report(model))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    x, keys = torch.randn(5, 64), set(model.state_dict())
    stock = model(x)
    torch.testing.assert_close(use_fdora(model)(x), stock)
    assert set(model.state_dict()) == keys and sum(row.fused + row.composed for row in report(model)) == 2


PROGRAM_4 = """
import torch
from torchtune.modules.peft import DoRALinear

{program}

for bias in (False, True):
    torch.manual_seed(0)
    stock = DoRALinear(12, 20, rank=4, alpha=8.0, use_bias=bias)
    for p in stock.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours = FdoraLinear(12, 20, rank=4, alpha=8.0, use_bias=bias)
    ours.load_state_dict(stock.state_dict())
    for layer in (stock, ours):
        layer.weight.requires_grad_(False)
    x = torch.randn(5, 12)
    torch.testing.assert_close(ours(x), stock(x))
    assert not torch.equal(ours(x), torch.nn.functional.linear(x, stock.weight, stock.bias))
print("same")
"""


def test_program_4_is_torchtunes_layer():
    """In a process of its own: PEFT refuses to share one with the torchao that torchtune needs."""
    folder = Path(sys.prefix) / "torchtune"
    if not folder.exists():
        pytest.skip(f"`make test` installs torchtune into {folder}; this environment was made otherwise")
    code = PROGRAM_4.format(program=PROGRAMS[3])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("same"), done.stderr


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for command in re.findall(r"^make (\w+)", README, re.M):
        assert command in targets
    for module in re.findall(r"python -m ([\w.]+)", README):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_every_public_name_is_in_the_readme():
    import fdora.functional

    assert [n for n in fdora.functional.__all__ if f"`{n}`" not in README] == []


def test_the_figures_are_the_committed_results():
    """Every row of the two cost tables, and the line on compose, is read off bench/results."""
    cpu, gpu, compose = (
        json.loads((ROOT / "bench/results" / name).read_text())["rows"]
        for name in ("cpu/norm_forms.json", "h100/norm_forms.json", "h100/compose.json")
    )
    found = re.findall(r"^\| (\d+) x (\d+), (\d+), (\w+) \| (.*) \|$", README, re.M)
    assert len(found) == 9
    for i, (N, K, r, dtype, cells) in enumerate(found):
        rows, forms, digits = (cpu, ("dense", "tiles", "factored"), 1) if i < 4 else (gpu, ("dense", "triton"), 3)
        case = [x for x in rows if (x["N"], x["K"], x["r"], x["dtype"]) == (int(N), int(K), int(r), dtype)]
        for cell, form in zip(cells.split(" | "), forms, strict=False):
            (x,) = (x for x in case if x["form"] == form)
            assert cell == f"{x['ms']:.{digits}f} / {x['peak_mb']:.0f} / {x['error']:.0e}"
    (x,) = (x for x in compose if (x["op"], x["M"], x["N"]) == ("dora_compose", 4096, 14336))
    line = next(line for line in README.splitlines() if line.startswith("`dora_compose` on the same H100"))
    wanted = [f"{x[f'{mode}_{way}_ms']:.3f}" for way in ("triton", "plain", "copy") for mode in ("fwd", "fwd_bwd")]
    assert re.findall(r"\d\.\d{3}", line) == wanted


def test_the_layers_are_the_committed_results():
    """The table of whole layers and that of twelve layers, and the host's microseconds."""
    quick = results("layer_quick")
    found = re.findall(r"^\| (\d+), (\d+) x (\d+), (\d+) \| ([\d. |]*) \|$", README, re.M)
    assert len(found) == 7
    ways = ("frozen", "bare", "peft_lora", "peft_dora", "peft_dora_compiled", "dorafactors", "fdora")
    for *sizes, cells in found:
        case = [x for x in quick if [x[n] for n in ("M", "K", "N", "r")] == list(map(int, sizes)) and x["mode"] == "fwd_bwd"]
        ms = {x["norm"]: x["ms"] for x in case}
        want = [ms["inside"][way] for way in ways] + [ms["given"]["fdora"]]
        assert cells.split(" | ") == [f"{v:.3f}" for v in want]
    found = re.findall(r"^\| (384|16|384, compiled) \| ([\d./ |]*) \|$", README, re.M)
    assert len(found) == 3
    for label, cells in found:
        rows = {x["way"]: x for x in results(f"layers12_r{label.split(',')[0]}_{'compiled' if ',' in label else 'eager'}")}
        for cell, way in zip(cells.split(" | "), ("frozen", "peft_lora", "peft_dora", "peft_fdora", "fdora"), strict=True):
            fields = ("inference_ms", "gradient_ms", "gradient_checkpointing_ms")
            assert cell == " / ".join(f"{rows[way][field]:.1f}" for field in fields)
    rows = {x["way"]: x for x in results("host")}
    line = re.search(r"forward (\d+) us against LoRA's (\d+), with backward (\d+) against (\d+), DoRA's (\d+)", README)
    want = [rows[w][f] for f in ("fwd_us", "fwd_bwd_us") for w in ("fdora", "peft_lora")] + [rows["peft_dora"]["fwd_bwd_us"]]
    assert list(line.groups()) == [f"{v:.0f}" for v in want]


def results(name):
    return json.loads((ROOT / f"bench/results/h100/{name}.json").read_text())["rows"]
