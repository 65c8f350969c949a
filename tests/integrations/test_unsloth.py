"""Unsloth's model and trainer on its CPU backend; and its GPU code's own promise to heed a DoRA adapter, called on the CPU."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

try:
    metadata.version("unsloth")
except metadata.PackageNotFoundError:
    pytest.skip("Unsloth is not installed; `make frameworks` runs this file with it", allow_module_level=True)

import torch
import unsloth  # before transformers, trl and peft, it asks
from datasets import Dataset
from trl import SFTConfig

from fdora import FdoraError
from fdora.integrations import _framework
from fdora.integrations.peft import report
from fdora.integrations.unsloth import restore, use_fdora
from tests.integrations import tiny
from tests.integrations.models import perturb
from tests.integrations.test_peft_model import snapshot
from tests.snippets import execute

STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("unsloth") / "model")


def made(folder, dropout=0.0):
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        folder, max_seq_length=128, load_in_4bit=False, dtype=torch.float32
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        use_dora=True,
        target_modules=tiny.LORA["target_modules"],
        max_seq_length=128,
    )
    torch.manual_seed(1)
    return perturb(model), tokenizer


def trained(model, tokenizer, out):
    args = SFTConfig(
        output_dir=str(out),
        max_steps=STEPS,
        max_length=64,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-2,
        disable_tqdm=True,
        seed=0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        dataset_text_field="text",
    )
    data = Dataset.from_dict({"text": tiny.lines(40)})
    unsloth.UnslothTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=data).train()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_its_trainer_trains_the_same_adapter(dropout, folder, tmp_path):
    want = trained(*made(folder, dropout), tmp_path / "stock")
    model, tokenizer = made(folder, dropout)
    got = trained(use_fdora(model), tokenizer, tmp_path / "fdora")
    tiny.same_adapter(got, want)
    rows = report(model)
    assert len(rows) == tiny.LAYERS
    assert all((row.composed if dropout else row.fused) >= STEPS and not row.fallbacks for row in rows), str(rows)


def test_dropout_of_the_adapters_input_alone(folder):
    model, _ = made(folder, 0.1)
    assert {row.dropout_mode for row in report(use_fdora(model, dropout_mode="lora"))} == {"lora"}


def test_generate_and_restore(folder):
    model, _ = made(folder)
    unsloth.FastLanguageModel.for_inference(model)
    ids = torch.arange(3, 19)[None]
    more = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "attention_mask": torch.ones_like(ids),
    }
    want = model.generate(ids, **more)
    before = snapshot(model)
    got = use_fdora(use_fdora(model)).generate(ids, **more)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))
    assert torch.equal(got.sequences, want.sequences)
    assert all(row.fused == 12 for row in report(model)), str(report(model))
    restore(restore(model))
    assert snapshot(model) == before


def test_the_snippet(folder):
    model = execute("Unsloth", name=folder)["model"]
    model(torch.arange(3, 19)[None])
    assert report(model) and all(row.fused or row.composed for row in report(model)), str(report(model))


def test_an_older_one_is_refused(folder, monkeypatch):
    monkeypatch.setattr(_framework, "version", lambda name: "2026.8.19")
    with pytest.raises(
        FdoraError, match=r"`unsloth` must be 2026.10.9 or newer, got 2026.8.19. pip install 'unsloth>=2026.10.9'"
    ):
        use_fdora(made(folder)[0])


FUSED = """
import torch, unsloth
from peft import LoraConfig, get_peft_model
from unsloth.kernels.fast_lora import apply_lora_mlp_swiglu, apply_lora_o, apply_lora_qkv
from unsloth.kernels.utils import fast_linear_forward
from fdora.integrations.unsloth import report, use_fdora
from tests.integrations import tiny
from tests.integrations.models import perturb

model = perturb(get_peft_model(tiny.llama(), LoraConfig(use_dora=True, **tiny.LORA)))
layer = model.base_model.model.model.layers[0]
attention, mlp = layer.self_attn, layer.mlp

def run(x):
    def inner(h):
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(h)) * mlp.up_proj(h))
    layers = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), attention.o_proj(x), inner(x), attention.q_proj(x)]
    fused = [*apply_lora_qkv(attention, x), apply_lora_o(attention, x), apply_lora_mlp_swiglu(mlp, x), fast_linear_forward(attention.q_proj, x)]
    for a, b in zip(layers, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return fused

with torch.no_grad():
    for tokens in (1, 5):
        x = torch.randn(1, tokens, 64)
        want = run(x)
        use_fdora(model)
        for a, b in zip(run(x), want, strict=True):
            torch.testing.assert_close(a, b)
assert all(row.fused for row in report(model) if "layers.0" in row.module), report(model)
print("heeded")
"""


def test_its_fused_functions_call_the_layers(tmp_path):
    """Its test-only switch imports the GPU's code on the CPU. Each function that Unsloth binds or decodes with must call the layer."""
    env = os.environ | {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", FUSED], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("heeded"), done.stderr[-3000:]
