"""Axolotl's own command trains with the plugin what PEFT trains, its fused kernels on or off."""

import copy
import json
import os
import types

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"

import pytest
import torch

pytest.importorskip("axolotl", reason="Axolotl is not installed; `make frameworks` runs this file with it")

import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import PluginManager, load_plugin
from axolotl.monkeypatch import lora_kernels
from axolotl.utils.dict import DictDefault
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaAttention

from fdora import FdoraError
from fdora.integrations import axolotl as shim
from fdora.integrations.peft import report
from tests.integrations import tiny
from tests.integrations.models import perturb
from tests.integrations.test_peft_model import snapshot
from tests.snippets import snippet

STEPS = 12
KERNELS = dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel"), True)
PLUGIN = yaml.safe_load(snippet("Axolotl", "yaml"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    tiny.checkpoint(folder / "model")
    for p in (0.0, 0.1):
        torch.manual_seed(1)
        lora = LoraConfig(use_dora=True, task_type="CAUSAL_LM", lora_dropout=p, **tiny.LORA)
        perturb(get_peft_model(tiny.llama(), lora)).save_pretrained(folder / f"adapter-{p}")
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in tiny.lines(40)))
    return folder


@pytest.fixture(autouse=True)
def clean():
    """What Axolotl keeps in this process: its plugins, and an attention class that it rewrites for its kernels."""
    before = LlamaAttention.forward
    yield
    PluginManager.get_instance().plugins.clear()
    LlamaAttention.forward = before
    if hasattr(LlamaAttention, "_original_forward"):
        del LlamaAttention._original_forward


def config(files, out, **more):
    return {
        "base_model": str(files / "model"),
        "adapter": "lora",
        "peft_use_dora": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_linear": True,
        "datasets": [{"path": str(files / "data.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(files / "prepared"),
        "sequence_len": 128,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "val_set_size": 0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "constant",
        "output_dir": str(out),
        "bf16": False,
        "fp16": False,
        "dataset_num_proc": 1,
        "lora_dropout": 0.0,
        "seed": 0,
        "lora_model_dir": str(files / "adapter-0.0"),
        **dict.fromkeys(KERNELS, False),
        **more,
    }


def trained(files, out, **more):
    out.mkdir()
    (out / "config.yml").write_text(yaml.dump(config(files, out, **more)))
    do_train(load_cfg(str(out / "config.yml")), TrainerCliArgs())
    PluginManager.get_instance().plugins.clear()
    return load_file(out / "adapter_model.safetensors")


def apart(got, want):
    assert got.keys() == want.keys() and len(want) == 3 * tiny.LAYERS
    return max((got[name] - want[name]).abs().max().item() for name in want)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_its_command_trains_pefts_adapter(dropout, files, tmp_path, monkeypatch, capsys):
    models, use_fdora = [], shim.use_fdora
    monkeypatch.setattr(shim, "use_fdora", lambda model, **how: models.append(model) or use_fdora(model, **how))
    start = {"lora_model_dir": str(files / f"adapter-{dropout}")}
    want = trained(files, tmp_path / "stock", **start)
    plain = trained(files, tmp_path / "plain", **PLUGIN, **start)
    assert capsys.readouterr().out.count("fused  composed") == 1
    with_kernels = trained(files, tmp_path / "kernels", **PLUGIN, **KERNELS, **start)
    assert apart(plain, want) < 1e-4 and apart(with_kernels, want) < 1e-4
    for model in models:
        path = "composed" if dropout else "fused"
        assert [getattr(row, path) for row in report(model)] == tiny.LAYERS * [STEPS], str(report(model))


def test_dropout_of_the_adapters_input_alone(files, tmp_path, monkeypatch):
    """A key of the configuration, which Axolotl checks."""
    models, use_fdora = [], shim.use_fdora
    monkeypatch.setattr(shim, "use_fdora", lambda model, **how: models.append(model) or use_fdora(model, **how))
    start = {"lora_model_dir": str(files / "adapter-0.1")}
    theirs = trained(files, tmp_path / "peft", **PLUGIN, **start)
    ours = trained(files, tmp_path / "lora", **PLUGIN, **start, fdora_dropout_mode="lora")
    assert [{row.dropout_mode for row in report(model)} for model in models] == [{"peft"}, {"lora"}]
    assert apart(ours, theirs) > 1e-4
    with pytest.raises(ValueError, match="fdora_dropout_mode"):
        trained(files, tmp_path / "both", **PLUGIN, **start, fdora_dropout_mode="both")


IDS = torch.arange(3, 35)[None]


def patched(files):
    """A model with Axolotl's kernels on it, made by their functions; and what it gave before."""
    cfg = DictDefault({"base_model": str(files / "model"), **KERNELS, "lora_embedding_kernel": True})
    torch.manual_seed(1)
    targets = {"target_modules": [*tiny.LORA["target_modules"], "embed_tokens"]}
    model = perturb(get_peft_model(tiny.llama(), LoraConfig(use_dora=True, task_type="CAUSAL_LM", **tiny.LORA | targets)))
    want = model(IDS).logits
    lora_kernels.patch_self_attn_lora(cfg)
    return lora_kernels.apply_lora_kernel_patches(model, cfg), want


def test_restore_leaves_no_trace(files):
    model, want = patched(files)
    before = snapshot(model)
    bound = {f"{module}.{name}" for module, (_, _, state) in before.items() for name in shim._INSTEAD if name in state}
    assert len(bound) == 2 * 3 + 1, bound
    assert shim.use_fdora(shim.use_fdora(model)) is model
    torch.testing.assert_close(model(IDS).logits, want)
    served = [row.fused + row.composed for row in report(model)]
    assert served == [1] * (tiny.LAYERS + 1), str(report(model))
    other = copy.deepcopy(model)
    assert shim.restore(model) is model
    shim.restore(model)
    assert snapshot(model) == before
    torch.testing.assert_close(other(IDS).logits, want)
    assert [row.fused + row.composed for row in report(other)] == served
    for module in other.modules():
        assert all(
            m.__self__ is module
            for name, m in module.__dict__.items()
            if name in shim._INSTEAD and isinstance(m, types.MethodType)
        )


def test_kernels_of_lora_layers_stay(files):
    """Only the layers with a DoRA adapter lose theirs."""
    model, _ = patched(files)
    kept = model.base_model.model.model.layers[0].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = getattr(kept, name)
        layer.lora_variant.clear()
        layer.use_dora["default"] = False
    fused = kept.forward
    shim.use_fdora(model)
    assert kept.forward == fused
    assert "forward" not in model.base_model.model.model.layers[1].mlp.__dict__
    for layer in model.base_model.model.model.layers:
        assert layer.self_attn.apply_qkv.__func__ is shim._qkv and layer.self_attn.apply_o.__func__ is shim._o


def test_plugin_alone():
    plugin = load_plugin(PLUGIN["plugins"][0])
    with pytest.raises(FdoraError, match="must have a DoRA adapter of PEFT, got none"):
        plugin.post_model_load(DictDefault({}), tiny.llama())
    plugin.post_model_load(DictDefault({"adapter": "lora"}), tiny.llama())
    with pytest.raises(FdoraError, match="must have a DoRA adapter of PEFT, got none"):
        plugin.post_model_load(DictDefault({"adapter": "lora"}), get_peft_model(tiny.llama(), LoraConfig(**tiny.LORA)))
    model = get_peft_model(tiny.llama(), LoraConfig(use_dora=True, **tiny.LORA))
    plugin.post_model_load(DictDefault({"adapter": "lora"}), model)
    assert isinstance(model, PeftModel) and {row.backend for row in report(model)} == {"eager"}
