"""SWIFT's own command trains with ``--tuner_type fdora`` what ``--tuner_type lora --use_dora true`` trains."""

import copy
import json
import shlex

import pytest
import torch

pytest.importorskip("swift.tuner_plugin", reason="ms-swift is not installed; `make frameworks` runs this file with it")

from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from swift import sft_main
from swift.pipelines.train.tuner import prepare_adapter
from swift.tuner_plugin import tuners_map
from swift.utils.utils import import_external_file

from fdora import FdoraError
from fdora.integrations import swift as shim
from fdora.integrations.peft import report, restore
from tests.integrations import tiny
from tests.integrations.models import perturb
from tests.snippets import snippet


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, a perturbed adapter of it, data, and the plugin file of the documentation."""
    folder = tmp_path_factory.mktemp("swift")
    model = tiny.checkpoint(folder / "model")
    torch.manual_seed(1)
    perturb(get_peft_model(tiny.llama(), LoraConfig(use_dora=True, **tiny.LORA))).save_pretrained(folder / "adapter")
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(*[iter(tiny.lines(40, 48))] * 2, strict=True)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "plugin").mkdir()
    (folder / "plugin" / "fdora_plugin.py").write_text(snippet("ms-swift", "python"))
    yield {
        "model": model,
        "adapter": str(folder / "adapter"),
        "data": str(folder / "data.jsonl"),
        "plugin": str(folder / "plugin" / "fdora_plugin.py"),
    }
    shim.unregister()


def command(files, out, *more):
    return [
        *(
            "--model",
            files["model"],
            "--dataset",
            files["data"],
            "--model_type",
            "llama",
            "--template",
            "default",
            "--output_dir",
            str(out),
        ),
        *(
            "--torch_dtype",
            "float32",
            "--max_steps",
            "12",
            "--learning_rate",
            "3e-3",
            "--per_device_train_batch_size",
            "2",
            "--max_length",
            "400",
        ),
        *(
            "--report_to",
            "none",
            "--split_dataset_ratio",
            "0",
            "--gradient_checkpointing",
            "false",
            "--check_model",
            "false",
            "--use_hf",
            "true",
        ),
        *(
            "--gradient_accumulation_steps",
            "1",
            "--lora_rank",
            "4",
            "--add_version",
            "false",
            "--logging_steps",
            "1",
            "--data_seed",
            "0",
            "--seed",
            "0",
            *more,
        ),
    ]


def trained(files, out, *more):
    sft_main(command(files, out, *more))
    return load_file(out / "checkpoint-12" / "adapter_model.safetensors")


def documented(files):
    """The options of the documentation, but for the model and the data."""
    program, verb, *words = shlex.split(snippet("ms-swift", "sh"))
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (program, verb) == ("swift", "sft") and options.keys() >= {"--model", "--dataset"}
    options["--external_plugins"] = files["plugin"]
    return [w for name, value in options.items() if name not in ("--model", "--dataset") for w in (name, value)]


@pytest.fixture
def made(monkeypatch):
    """The models that went through the shim."""
    seen, use_fdora = [], shim.use_fdora
    monkeypatch.setattr(shim, "use_fdora", lambda model, **how: seen.append(model) or use_fdora(model, **how))
    return seen


@pytest.mark.parametrize("dropout", ["0", "0.05"])
@pytest.mark.parametrize("start", ["fresh", "adapter"])
def test_its_command_trains_the_same_adapter(start, dropout, files, made, tmp_path):
    more = ["--lora_dropout", dropout] + (["--adapters", files["adapter"]] if start == "adapter" else [])
    want = trained(files, tmp_path / "stock", "--tuner_type", "lora", "--use_dora", "true", *more)
    got = trained(files, tmp_path / "fdora", *documented(files), *more)
    tiny.same_adapter(got, want)
    magnitudes = [n for n in want if "magnitude" in n]
    assert max((want[n] / want[n].mean() - 1).abs().max() for n in magnitudes) > 1e-2
    rows = report(made[0])
    p = float(dropout) if start == "fresh" else 0.0
    assert len(rows) == tiny.LAYERS
    assert all((row.composed if p else row.fused) == 12 and not row.fallbacks for row in rows), str(rows)


def test_a_fresh_adapter_is_swifts(files, made, tmp_path):
    """Rank, dropout, targets: whatever SWIFT makes of its arguments, with DoRA."""
    from swift.arguments import SftArguments

    args = SftArguments(
        model=files["model"],
        model_type="llama",
        template="default",
        dataset=[files["data"]],
        torch_dtype="float32",
        use_hf=True,
        lora_rank=5,
        external_plugins=[files["plugin"]],
        tuner_type="fdora",
        output_dir=str(tmp_path),
        check_model=False,
    )
    base = args.get_model_processor()[0]
    stock_args = copy.copy(args)
    stock_args.tuner_type, stock_args.use_dora = "lora", True
    torch.manual_seed(0)
    stock = prepare_adapter(stock_args, copy.deepcopy(base))
    torch.manual_seed(0)
    ours = tuners_map["fdora"].prepare_model(args, base)
    assert (args.tuner_type, args.use_dora) == ("fdora", False)
    assert ours.peft_config["default"].to_dict() == stock.peft_config["default"].to_dict()
    assert ours.peft_config["default"].lora_dropout == 0.05 and ours.peft_config["default"].use_dora
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), stock.parameters(), strict=True))
    assert {row.dropout_mode for row in report(ours)} == {"peft"}
    shim.register(dropout_mode="lora")
    again = tuners_map["fdora"].prepare_model(args, restore(ours).unload())
    assert {row.dropout_mode for row in report(again)} == {"lora"}
    shim.register()
    args.tuner_backend = "unsloth"
    with pytest.raises(FdoraError, match="must be peft, got unsloth"):
        tuners_map["fdora"].prepare_model(args, base)


def test_what_swift_gathered_is_saved(files, tmp_path):
    """Of a sharded model its own tensors are pieces."""
    model = PeftModel.from_pretrained(tiny.llama(), files["adapter"])
    gathered = {n: t + 1 for n, t in model.state_dict().items()}
    shim.FdoraTuner.save_pretrained(model, str(tmp_path), state_dict=gathered)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    own = load_file(f"{files['adapter']}/adapter_model.safetensors")
    assert saved.keys() == own.keys()
    assert all(torch.equal(t, own[n] + 1) for n, t in saved.items())


def test_registered_and_not(files):
    before = dict(tuners_map)
    before.pop("fdora", None)
    shim.register()
    assert tuners_map["fdora"] is shim.FdoraTuner
    shim.unregister()
    shim.unregister()
    assert tuners_map == before
    with pytest.raises(FdoraError, match="must be a file of your own, got this one"):
        import_external_file(shim.__file__)
