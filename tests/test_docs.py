"""The README and docs/integrations.md keep their word: their programs run and do what they say, their commands exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.snippets import PAGE, SNIPPETS, execute

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


@pytest.mark.parametrize("bias", [False, True])
def test_program_3_is_pefts_model(bias):
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Linear(12, 20, bias=bias), torch.nn.ReLU(), torch.nn.Linear(20, 6, bias=bias))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], use_dora=True))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    x = torch.randn(5, 12)
    before, keys = model(x), set(model.state_dict())
    space = run(3)
    variant = space["FdoraLinearVariant"]
    assert space["use_fdora"](model) is model
    assert sum(isinstance(v, variant) for m in model.modules() for v in getattr(m, "lora_variant", {}).values()) == 2
    torch.testing.assert_close(model(x), before)
    assert set(model.state_dict()) == keys


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


# (section of docs/integrations.md, language) -> the test that runs it
RUN_BY = {
    ("PEFT", "python"): "test_docs.py",
    ("TRL", "python"): "integrations/test_trl.py",
    ("Axolotl", "yaml"): "integrations/test_axolotl.py",
    ("ms-swift", "python"): "integrations/test_swift.py",
    ("ms-swift", "sh"): "integrations/test_swift.py",
    ("LLaMA-Factory", "sh"): "integrations/test_llamafactory.py",
    ("LLaMA-Factory", "yaml"): "integrations/test_llamafactory.py",
    ("Unsloth", "python"): "integrations/test_unsloth.py",
    ("torchtune", "python"): "test_docs.py",
}


def test_every_snippet_is_run_by_a_test():
    assert SNIPPETS.keys() == RUN_BY.keys() and len(SNIPPETS) == PAGE.count("```") // 2
    for (section, language), file in RUN_BY.items():
        code = (ROOT / "tests" / file).read_text()
        call = f'execute("{section}"' if language == "python" else f'snippet("{section}", "{language}")'
        assert call in code or f'snippet("{section}", "{language}")' in code, f"{file} does not run {section}'s {language}"


def test_the_peft_snippet(capsys):
    space = execute("PEFT")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(re.search(r"8  eager +1 +0 +0 ", line) for line in lines[1:3])
    from peft.tuners.lora.variants import DoraLinearVariant

    variants = [v for m in space["model"].modules() for v in getattr(m, "lora_variant", {}).values()]
    assert [type(v) for v in variants] == 2 * [DoraLinearVariant]


TORCHTUNE = """
import torch, torchtune.models.llama3_2 as llamas
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params

def small(attention, apply_lora_to_mlp, lora_rank, use_dora):
    return lora_llama3_2(attention, apply_lora_to_mlp, vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64,
                         intermediate_dim=48, lora_rank=lora_rank, lora_alpha=8, use_dora=use_dora)

llamas.lora_llama3_2_1b = small
from tests.snippets import execute
space = execute("torchtune")
for p in space["model"].parameters():
    torch.nn.init.normal_(p, std=0.1)
set_trainable_params(space["model"], get_adapter_params(space["model"]))  # as its recipes do
ids = torch.arange(20)[None]
y = space["model"](ids)
rows = space["report"](space["model"])
assert len(rows) == 12 and all(row == {"fused": 1} for row in rows.values()), rows
torch.testing.assert_close(space["restore"](space["model"])(ids), y)
print("same")
"""


def test_the_torchtune_snippet():
    """In a process of its own, on a model that is smaller than the one it names."""
    folder = Path(sys.prefix) / "torchtune"
    if not folder.exists():
        pytest.skip(f"`make test` installs torchtune into {folder}; this environment was made otherwise")
    if not (ROOT / "fdora" / "integrations" / "torchtune.py").exists():
        pytest.skip("this checkout has no fdora/integrations/torchtune.py")
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", TORCHTUNE], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("same"), done.stderr


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for command in re.findall(r"^make (\w+)", README, re.M) + re.findall(r"`make (\w+)`", PAGE):
        assert command in targets
    for module in re.findall(r"python -m ([\w.]+)", README + PAGE):
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
        for cell, way in zip(cells.split(" | "), ("frozen", "peft_lora", "peft_dora", "fdora"), strict=True):
            fields = ("inference_ms", "gradient_ms", "gradient_checkpointing_ms")
            assert cell == " / ".join(f"{rows[way][field]:.1f}" for field in fields)
    rows = {x["way"]: x for x in results("host")}
    line = re.search(r"forward (\d+) us against LoRA's (\d+), with backward (\d+) against (\d+), DoRA's (\d+)", README)
    want = [rows[w][f] for f in ("fwd_us", "fwd_bwd_us") for w in ("fdora", "peft_lora")] + [rows["peft_dora"]["fwd_bwd_us"]]
    assert list(line.groups()) == [f"{v:.0f}" for v in want]


def results(name):
    return json.loads((ROOT / f"bench/results/h100/{name}.json").read_text())["rows"]
