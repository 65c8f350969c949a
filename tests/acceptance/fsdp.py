"""Each framework's own command, sharded, with and without fdora: ``python -m tests.acceptance.fsdp --work .venv-frameworks``.

A small model with random weights and four steps, in two processes: on two GPUs where there are two, else on a CPU, where one question
of each framework is answered for it (fsdp_worker.py). Losses and the adapters that it writes must be those of PEFT's or torchtune's own
DoRA under the same sharding, every call of fdora's fused, and each process hold half of the parameters. TRL and torchtune want the
environment of ``make test``; for the others one each is made (frameworks.py). ``python -m tests.acceptance.fsdp "axolotl fsdp2"`` runs
one. Half a minute each. Exits with 1 where something does not hold.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.acceptance.frameworks import RECIPES, ROOT, chosen, environment
from tests.integrations import tiny
from tests.integrations.models import perturb

STEPS, RATE, TARGETS = 4, 1e-2, tiny.LORA["target_modules"]
CUDA = torch.cuda.device_count() > 1


def sharding(version):
    """As transformers takes it. FSDP1 cannot fill empty parameters on a CPU, and PEFT's DoRA wants flat ones."""
    more = {"reshard_after_forward": "full_shard", "use_orig_params": False, "sync_module_states": CUDA}
    own = {"reshard_after_forward": True} if version == 2 else more
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {"version": version, "state_dict_type": "FULL_STATE_DICT", **wrap, **own}


def files(folder):
    """The model, an adapter for where fresh ones follow no seed (Axolotl), and the same text as each framework wants it."""
    with contextlib.redirect_stderr(io.StringIO()):  # of progress
        tiny.checkpoint(folder / "model")
    torch.manual_seed(1)
    perturb(get_peft_model(tiny.llama(), LoraConfig(use_dora=True, task_type="CAUSAL_LM", **tiny.LORA))).save_pretrained(
        folder / "adapter"
    )
    pairs = list(zip(*[iter(tiny.lines(40, 48))] * 2, strict=True))
    talks = [[("user", a), ("assistant", b)] for a, b in pairs]
    rows = {
        "text": [{"text": t} for t in tiny.lines(40)],
        "swift": [{"messages": [{"role": r, "content": t} for r, t in talk]} for talk in talks],
        "v1": [{"messages": [{"role": r, "content": [{"type": "text", "value": t}]} for r, t in talk]} for talk in talks],
        "v0": [{"instruction": a, "input": "", "output": b} for a, b in pairs],
    }
    for name, lines in rows.items():
        (folder / name).mkdir()
        (folder / name / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "v0" / "dataset_info.json").write_text(json.dumps({"readme": {"file_name": "data.jsonl"}}))
    (folder / "plugin.py").write_text("from fdora.integrations.swift import register\nregister()\n")


def options(**given):
    """For a command line."""
    return [word for name, value in given.items() for word in (f"--{name}", *([value] if isinstance(value, str) else value))]


def written(folder, name, values):
    """JSON, which is YAML as well."""
    (folder / name).write_text(json.dumps(values))
    return str(folder / name)


def trl(folder, out, fdora, version):
    return options(
        model_name_or_path=f"{folder}/model",
        dataset_name=f"{folder}/text",
        use_peft=[],
        use_dora=[],
        lora_r="4",
        lora_alpha="8",
        lora_dropout="0",
        lora_target_modules=TARGETS,
        output_dir=out,
        max_steps=str(STEPS),
        max_length="64",
        bf16="false",
        use_cpu=str(not CUDA).lower(),
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size="2",
        gradient_checkpointing="false",
        learning_rate=str(RATE),
        fsdp="full_shard",
        fsdp_config=written(folder, "trl.json", sharding(version)),
    )


def llamafactory(folder, out, fdora, version):
    config = {
        **{
            "model_name_or_path": f"{folder}/model",
            "output_dir": out,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
        },
        **{"use_dora": True, "lora_rank": 4, "lora_target": "all", "dataset": "readme", "dataset_dir": f"{folder}/v0"},
        **{"template": "default", "cutoff_len": 256, "max_steps": STEPS, "learning_rate": RATE, "report_to": "none"},
        **{
            "per_device_train_batch_size": 2,
            "disable_gradient_checkpointing": True,
            "use_cpu": not CUDA,
            "save_strategy": "no",
        },
        **{"fsdp": "full_shard auto_wrap", "fsdp_config": sharding(version), "ddp_timeout": 600},
    }
    return ["train", written(folder, "llamafactory.yaml", config)]


def llamafactory_v1(folder, out, fdora, version):
    peft = {"name": "fdora"} if fdora else {"name": "lora", "use_dora": True}
    config = {
        **{"model": f"{folder}/model", "train_dataset": f"{folder}/v1/data.jsonl", "output_dir": out, "template": "chatml"},
        **{"peft_config": {"r": 4, "lora_dropout": 0.0, **peft}, "max_steps": STEPS, "learning_rate": RATE, "seed": 0},
        **{"micro_batch_size": 2, "cutoff_len": 256, "bf16": False, "enable_activation_checkpointing": False},
        **{"batching_workers": 0, "dist_config": {"name": "fsdp2", "dcp_path": None}},
    }
    return ["sft", written(folder, "v1.yaml", config)]


def swift(folder, out, fdora, version):
    tuner = {"external_plugins": f"{folder}/plugin.py", "tuner_type": "fdora"}
    shards = {"fsdp": "full_shard auto_wrap", "fsdp_config": sharding(version) | {"fsdp_version": version}}
    return options(
        model=f"{folder}/model",
        dataset=f"{folder}/swift/data.jsonl",
        model_type="llama",
        template="default",
        output_dir=out,
        torch_dtype="float32",
        use_cpu=str(not CUDA).lower(),
        max_steps=str(STEPS),
        learning_rate=str(RATE),
        per_device_train_batch_size="2",
        gradient_accumulation_steps="1",
        gradient_checkpointing="false",
        max_length="400",
        report_to="none",
        split_dataset_ratio="0",
        check_model="false",
        use_hf="true",
        save_only_model="true",
        lora_rank="4",
        lora_dropout="0",
        add_version="false",
        fsdp=written(folder, "swift.json", shards),
        **tuner if fdora else {"tuner_type": "lora", "use_dora": "true"},
    )


def axolotl(folder, out, fdora, version):
    config = {
        **{"base_model": f"{folder}/model", "output_dir": out, "adapter": "lora", "peft_use_dora": True, "lora_r": 4},
        "lora_model_dir": f"{folder}/adapter",
        **{"lora_alpha": 8, "lora_target_linear": True, "lora_dropout": 0.0, "max_steps": STEPS, "learning_rate": RATE},
        **{"datasets": [{"path": f"{folder}/text/data.jsonl", "ds_type": "json", "type": "completion"}]},
        **{"dataset_prepared_path": f"{folder}/prepared", "dataset_num_proc": 1, "sequence_len": 128, "val_set_size": 0},
        **{"micro_batch_size": 2, "gradient_accumulation_steps": 1, "optimizer": "adamw_torch", "lr_scheduler": "constant"},
        **{"bf16": False, "fp16": False, "seed": 0, "save_strategy": "no"},
        **dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel"), False),
        **{"fsdp_version": version, "fsdp_config": sharding(version) | {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}},
        **({"plugins": ["fdora.integrations.axolotl.FdoraPlugin"]} if fdora else {}),
    }
    del config["fsdp_config"]["version"]
    if version == 1:
        del config["fsdp_config"]["reshard_after_forward"]  # a word there, where Axolotl wants a truth value
    return [written(folder, "axolotl.yaml", config)]


def torchtune(folder, out, fdora, version):
    model = {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}
    model |= {"lora_rank": 4, "lora_alpha": 8.0, "use_dora": True, "vocab_size": 260, "num_layers": 2, "num_heads": 4}
    model |= {"num_kv_heads": 2, "embed_dim": 64, "max_seq_len": 512, "intermediate_dim": 96, "rope_base": 10000}
    made = "tests.acceptance.fsdp_worker.torchtune_model" if fdora else "torchtune.models.llama3.lora_llama3"
    files = {"checkpoint_dir": f"{folder}/model", "checkpoint_files": ["model.safetensors"], "output_dir": out}
    data = {"source": "json", "data_files": f"{folder}/text/data.jsonl", "split": "train", "column": "text"}
    config = {
        **{
            "output_dir": out,
            "model": {"_component_": made, **model},
            "seed": 0,
            "shuffle": False,
            "batch_size": 2,
            "epochs": 1,
        },
        "tokenizer": {"_component_": "tests.acceptance.fsdp_worker.TorchtuneTokenizer", "folder": f"{folder}/model"},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", **files, "model_type": "LLAMA3"},
        "dataset": {"_component_": "torchtune.datasets.text_completion_dataset", **data},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": RATE},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": f"{out}/logs"},
        **{
            "max_steps_per_epoch": STEPS,
            "gradient_accumulation_steps": 1,
            "device": "cuda" if CUDA else "cpu",
            "dtype": "fp32",
        },
        **{"resume_from_checkpoint": False, "save_adapter_weights_only": True, "enable_activation_checkpointing": True},
    }
    return ["--config", written(folder, "torchtune.yaml", config)]


CELLS = {
    "torchtune fsdp2": (torchtune, 2),
    "trl fsdp2": (trl, 2),
    "trl fsdp1": (trl, 1),
    "llamafactory_v1 fsdp2": (llamafactory_v1, 2),
    "llamafactory fsdp2": (llamafactory, 2),
    "llamafactory fsdp1": (llamafactory, 1),
    "swift fsdp2": (swift, 2),
    "swift fsdp1": (swift, 1),
    "axolotl fsdp2": (axolotl, 2),
    "axolotl fsdp1": (axolotl, 1),
}


def train(python, folder, name, who, packages):
    """What each process found, the adapter that it gathers, and how many tensors it writes; or an error."""
    make, version = CELLS[name]
    out, framework = str(folder / who), make.__name__
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (*packages, ROOT))), "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    env |= {"USE_V1": "1"} if framework == "llamafactory_v1" else {}
    env |= {} if CUDA else {"CUDA_VISIBLE_DEVICES": ""}  # one GPU is none
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.acceptance.fsdp_worker",
    ]
    command += [framework, who, str(folder / f"{who}.found"), *make(folder, out, who == "fdora", version)]
    with open(folder / "log", "w") as log:
        done = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=600)
    if done.returncode:
        lines = (folder / "log").read_text(errors="replace").splitlines()
        raised = [line for line in lines if "Error: " in line and not any(t in line for t in ("ChildFailed", "closed by peer"))]
        return (raised or lines)[-1][-300:]
    found = [json.loads((folder / f"{who}.found.{rank}").read_text()) for rank in range(2)]
    gathered, saved = folder / f"{who}.found.0.safetensors", sorted(Path(out).rglob("adapter_model.safetensors"))
    written = load_file(saved[-1]) if saved else {}
    return found, load_file(gathered) if gathered.exists() else written, len(written)


def compare(version, stock, ours, forwards):
    """What does not hold, or nothing; and figures. ``forwards``: of each step; two with checkpointing."""
    (theirs, want, _), (mine, got, files) = stock, ours
    pairs = [(a, b) for s, o in zip(theirs, mine, strict=True) for a, b in zip(s["losses"], o["losses"], strict=False)]
    losses = max((abs(a - b) / abs(a) for a, b in pairs), default=0)  # torchtune's are sums over tokens
    same = got.keys() == want.keys() and len(want) == 3 * tiny.LAYERS
    adapters = max((got[n].double() - p.double()).abs().max().item() for n, p in want.items()) if same else float("inf")
    trained = min((p.abs().max().item() for n, p in want.items() if "lora_B" in n), default=0)
    held = max(o["held"] / o["of"] for o in (*theirs, *mine))
    wrong = [
        *(["not four steps"] if any(len(o["losses"]) != STEPS for o in (*theirs, *mine)) else []),
        *([f"calls {mine[0]['paths']}"] if any(o["paths"] != {"fused": forwards * STEPS * tiny.LAYERS} for o in mine) else []),
        *([f"sharded by {mine[0]['by']}"] if any(o["by"] != [f"fsdp{version}"] for o in (*theirs, *mine)) else []),
        *([f"a process holds {held:.2f} of the parameters"] if held > 0.52 else []),
        *([f"losses {losses:.0e} apart"] if losses > (1e-4 if CUDA else 1e-6) else []),
        *([f"adapters {adapters:.0e} apart"] if not adapters < (1e-3 if CUDA else 1e-4) or trained < RATE / 2 else []),
    ]
    return (
        "; ".join(wrong),
        f"losses {losses:.0e}, adapters {adapters:.0e} apart, {held:.2f} of the parameters in a process, {files} tensors in its file",
    )


def run(name, work):
    framework = CELLS[name][0].__name__.removesuffix("_v1")
    python = environment(framework, work) if framework in RECIPES and framework != "trl" else sys.executable
    packages = [Path(sys.prefix) / "torchtune"] if framework == "torchtune" else []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        files(folder)
        stock = train(python, folder, name, "stock", packages)
        ours = train(python, folder, name, "fdora", packages)
    for who, said in (("without fdora", stock), ("with fdora", ours)):
        if isinstance(said, str):
            return f"{who}: {said}", ""
    return compare(CELLS[name][1], stock, ours, 2 if framework == "torchtune" else 1)


def main():
    failed, (names, work) = 0, chosen(__doc__, CELLS)
    for name in names:
        wrong, said = run(name, work)
        failed += bool(wrong)
        print(f"{name}: {wrong or 'ok'}{f' ({said})' if said else ''}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
