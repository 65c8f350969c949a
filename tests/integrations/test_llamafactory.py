"""LLaMA-Factory's own commands, of both its versions, train with fdora what they train without."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed; `make frameworks` runs this file with it")

import yaml
from llamafactory.cli import main as their_main
from llamafactory.v1.plugins.model_plugins.peft import PeftPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from fdora import FdoraError
from fdora.integrations import llamafactory as shim
from fdora.integrations._peft.dora import Dora
from tests.integrations import tiny
from tests.integrations.models import perturb
from tests.snippets import snippet

STEPS = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, a perturbed adapter of it, and data for both versions."""
    folder = tmp_path_factory.mktemp("llamafactory")
    tiny.checkpoint(folder / "model")
    torch.manual_seed(1)
    perturb(get_peft_model(tiny.llama(), LoraConfig(use_dora=True, **tiny.LORA))).save_pretrained(folder / "adapter")
    pairs = list(zip(*[iter(tiny.lines(40, 48))] * 2, strict=True))
    (folder / "data.json").write_text(json.dumps([{"instruction": a, "input": "", "output": b} for a, b in pairs]))
    (folder / "dataset_info.json").write_text(json.dumps({"readme": {"file_name": "data.json"}}))
    said = [
        [(role, [{"type": "text", "value": t}]) for role, t in zip(("user", "assistant"), pair, strict=True)] for pair in pairs
    ]
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in said]
    (folder / "v1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def v0(files, out, **more):
    return {
        "model_name_or_path": str(files / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "use_dora": True,
        "lora_rank": 4,
        "lora_target": "all",
        "dataset": "readme",
        "dataset_dir": str(files),
        "template": "default",
        "cutoff_len": 256,
        "output_dir": str(out),
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_gradient_checkpointing": True,
        "use_cpu": True,
        "preprocessing_num_workers": None,
        "dataloader_num_workers": 0,
        "seed": 0,
        **more,
    }


def v1(files, out, name, **peft):
    return {
        "model": str(files / "model"),
        "template": "chatml",
        "peft_config": {"r": 4, "name": name, **peft},
        "train_dataset": str(files / "v1.jsonl"),
        "output_dir": str(out),
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "micro_batch_size": 2,
        "cutoff_len": 256,
        "bf16": False,
        "batching_workers": 0,
        "enable_activation_checkpointing": False,
        "seed": 0,
    }


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs a command in this process; its adapter, and the calls that fdora served."""
    layers, init = [], Dora.__init__
    monkeypatch.setattr(Dora, "__init__", lambda self, *args: init(self, *args) or layers.append(self))

    def run(main, config):
        layers.clear()
        (tmp_path / "config.yaml").write_text(yaml.dump(config))
        monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", str(tmp_path / "config.yaml")])
        try:
            main()
        finally:
            shim.disable()
            shim.unregister()
        return load_file(os.path.join(config["output_dir"], "adapter_model.safetensors")), sum(
            (layer.calls for layer in layers), Counter()
        )

    return run


@pytest.mark.parametrize("start", ["fresh", "adapter"])
def test_the_first_version(start, files, command, tmp_path):
    more = {"adapter_name_or_path": str(files / "adapter")} if start == "adapter" else {}
    want, none = command(their_main, v0(files, tmp_path / "stock", **more))
    got, calls = command(shim.main, v0(files, tmp_path / "fdora", **more))
    assert not none and calls == {"fused": STEPS * tiny.LAYERS}
    tiny.same_adapter(got, want)


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_the_second_version(dropout, files, command, tmp_path, monkeypatch):
    monkeypatch.setenv("USE_V1", "1")
    want, none = command(their_main, v1(files, tmp_path / "stock", "lora", use_dora=True, lora_dropout=dropout))
    documented = yaml.safe_load(snippet("LLaMA-Factory", "yaml"))["peft_config"]
    got, calls = command(shim.main, v1(files, tmp_path / "fdora", **documented | {"r": 4}, lora_dropout=dropout))
    assert not none and calls == {"composed" if dropout else "fused": STEPS * tiny.LAYERS}
    tiny.same_adapter(got, want)


@pytest.mark.parametrize("version", ["first", "second"])
def test_dropout_of_the_adapters_input_alone(version, files, command, tmp_path, monkeypatch):
    """``--dropout-mode lora`` before the command."""
    modes, stock = set(), Dora.count
    monkeypatch.setattr(Dora, "count", lambda self, path: modes.add(self.dropout_mode) or stock(self, path))

    def asked():
        sys.argv[1:1] = ["--dropout-mode", "lora"]
        shim.main()

    if version == "second":
        monkeypatch.setenv("USE_V1", "1")
        config = v1(files, tmp_path / "out", "fdora", lora_dropout=0.05)
    else:
        config = v0(files, tmp_path / "out", lora_dropout=0.05)
    _, calls = command(asked, config)
    assert modes == {"lora"} and calls == {"composed": STEPS * tiny.LAYERS}
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "--dropout-mode", "both", "version"])
    with pytest.raises(FdoraError, match="`dropout_mode` must be 'peft' or 'lora', got 'both'"):
        shim.main()


def test_an_adapter_that_is_merged_for_inference(files, monkeypatch):
    shim.register()
    config = {"name": "fdora", "adapter_name_or_path": str(files / "adapter")}
    merged = PeftPlugin("fdora")(tiny.llama(), config, False)
    shim.unregister()
    assert not isinstance(merged, PeftModel)
    ids = torch.arange(3, 35)[None]
    want = PeftModel.from_pretrained(tiny.llama(), files / "adapter")(ids).logits
    torch.testing.assert_close(merged(ids).logits, want)


def test_registered_and_not():
    before = {name: dict(methods) for name, methods in PeftPlugin._registry.items()}
    shim.register()
    assert {"fdora"} == PeftPlugin._registry.keys() - before.keys()
    with torch.device("meta"):
        empty = tiny.llama()
    with pytest.raises(FdoraError, match="must have its weights, got one on meta"):
        PeftPlugin("fdora")(empty, {"name": "fdora"}, True)
    shim.unregister()
    shim.unregister()
    assert PeftPlugin._registry == before


@pytest.mark.parametrize(
    ("command", "env", "message"),
    [
        ("train", "FORCE_TORCHRUN", "must be started by torchrun, got one process"),
        ("train", "USE_RAY", "must happen in this process, got USE_RAY"),
        ("webui", "USE_KT", "must happen in this process, got webui"),
    ],
)
def test_processes_without_fdora_are_refused(command, env, message, monkeypatch):
    monkeypatch.setenv(env, "1")
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", command, "config.yaml"])
    with pytest.raises(FdoraError, match=message):
        shim.main()


COUNTED = """
from collections import Counter
from fdora.integrations._peft.dora import Dora
from fdora.integrations.llamafactory import main

layers, init = [], Dora.__init__
Dora.__init__ = lambda self, *args: init(self, *args) or layers.append(self)
main()
print("calls", dict(sum((layer.calls for layer in layers), Counter())))
"""


def test_the_first_version_under_torchrun(files, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.dump(v0(files, tmp_path / "out")))
    (tmp_path / "counted.py").write_text(COUNTED)
    _, line = snippet("LLaMA-Factory", "sh").splitlines()
    line = line.replace("torchrun", "-m torch.distributed.run").replace("-node 8", "-node 2")
    words = line.replace("-m fdora.integrations.llamafactory", str(tmp_path / "counted.py")).split()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and (tmp_path / "out" / "adapter_model.safetensors").exists(), done.stderr[-3000:]
    assert done.stdout.count(f"calls {{'fused': {STEPS * tiny.LAYERS}}}") == 2, done.stdout[-3000:]


def test_the_second_version_under_torchrun(monkeypatch):
    """No training: under torchrun it synchronises an accelerator, and there is none. What its workers' entry point gets."""
    from llamafactory.v1 import launcher

    got = []
    monkeypatch.setattr(launcher, "main", lambda: got.append((sys.argv[1:], "fdora" in PeftPlugin._registry)))
    for name in ("USE_V1", "LOCAL_RANK", "FORCE_TORCHRUN"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", ["-m", "sft", "config.yaml"])
    shim.main()
    shim.disable()
    shim.unregister()
    assert got == [(["sft", "config.yaml"], True)]


def test_as_a_command(files, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.dump(v0(files, tmp_path / "out")))
    line, _ = snippet("LLaMA-Factory", "sh").splitlines()
    python, *words = line.split()
    assert python == "python"
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "adapter_model.safetensors").exists(), done.stderr[-3000:]
