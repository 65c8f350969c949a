"""``fdora train jobs.toml``: from files to adapters in files, as fdora.jobs.train makes them."""

import json

import pytest
import torch

pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")
pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from fdora import FdoraError
from fdora.__main__ import main
from fdora.jobs.causal import __main__ as command
from fdora.jobs.schedule.order import batches_of
from tests.process import torchrun

WORDS = ["<s>", "</s>", *["the", "court", "holds", "that", "a", "cell", "is", "of", "some", "use"]]
TOML = """
model = "{folder}/model"
output = "{folder}/out"
capacity = 32
dtype = "float32"
device = "cpu"

[jobs.law]
data = "{folder}/law.jsonl"
evaluation = "{folder}/law.jsonl"
lr = 2e-2
batch = 2
epochs = 2
adapter = {{ r = 4, lora_alpha = 8, use_dora = true, target_modules = ["q_proj", "v_proj"] }}

[jobs.med]
data = "{folder}/med.jsonl"
lr = 0.01
steps = 3
seed = 1
betas = [0.9, 0.99]
adapter = {{ r = 2, target_modules = "all-linear" }}
"""


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path / "model")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(WORDS))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    law = [
        {"prompt": "the court", "completion": "holds that"},
        {"text": "a cell"},
        {"input_ids": [0, 3, 1], "labels": [-100, 3, 1]},
    ]
    for name, lines in (("law", law), ("med", [{"text": "a cell is of some use"}, {"text": "the cell"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "jobs.toml").write_text(TOML.format(folder=tmp_path))
    return tmp_path


def adapters(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder / "out" / "law", adapter_name="law")
    model.load_adapter(folder / "out" / "med", adapter_name="med")
    return {name: p for name, p in model.state_dict().items() if "lora_" in name}


def test_it_trains_saves_and_goes_on(folder, capsys):
    assert main(["train", str(folder / "jobs.toml"), "--plan"]) == 0
    said = capsys.readouterr().out
    assert "law: 4 optimizer steps, 6 samples" in said and "med: 3 optimizer steps" in said and not (folder / "out").exists()
    assert main(["train", str(folder / "jobs.toml")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("law ") for line in said) == 4 and sum(line.startswith("med ") for line in said) == 3
    assert any("4/4" in line and "evaluation" in line for line in said)
    first = adapters(folder)
    assert any(p.abs().sum() for name, p in first.items() if "lora_B.law" in name)
    assert main(["train", str(folder / "jobs.toml")]) == 0  # is at its end already: nothing is trained again
    assert "law " not in capsys.readouterr().out
    again = adapters(folder)
    assert first.keys() == again.keys() and all(map(torch.equal, first.values(), again.values()))


def test_two_processes_of_torchrun_train_what_one_does(folder, capsys):
    """The model has two layers, one for each; the first process speaks and saves."""
    config = LlamaConfig.from_pretrained(folder / "model", num_hidden_layers=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    assert main(["train", str(folder / "jobs.toml")]) == 0
    one, said = adapters(folder), capsys.readouterr().out.splitlines()
    for name in ("out", "jobs.toml"):
        (folder / name).rename(folder / f"of one {name}")
    (folder / "jobs.toml").write_text("stages = 2\n" + TOML.format(folder=folder))
    with pytest.raises(SystemExit):
        main(["train", str(folder / "jobs.toml")])
    assert "`stages` must be 1 in a process of its own, got 2. Start the processes by torchrun" in capsys.readouterr().err
    printed = torchrun("-m", "fdora", "train", folder / "jobs.toml", cwd=folder)
    lines = [line for line in printed.splitlines() if line.startswith(("law ", "med ", "saved"))]
    assert sorted(line.partition(":")[0] for line in lines) == sorted(line.partition(":")[0] for line in said)
    for name, p in adapters(folder).items():
        torch.testing.assert_close(p, one[name], rtol=1e-3, atol=1e-5)


def test_it_says_what_it_will_do(folder, capsys):
    """The same in either way to ask for it; nothing is written but the picture."""
    toml, picture = str(folder / "jobs.toml"), folder / "plan.png"
    assert main(["train", toml, "--plan"]) == 0
    said = capsys.readouterr().out
    assert main(["plan", toml, "--picture", str(picture)]) == 0 and capsys.readouterr().out == said
    assert picture.read_bytes()[1:4] == b"PNG" and not (folder / "out").exists()
    assert "memory: not planned. fdora.jobs.plan: `weights` must be one of bf16" in said  # of float32
    assert "capacity 32: as given" in said
    law, med, *_ = said.splitlines()
    assert law.startswith("law: 4 optimizer steps, 6 samples, 26 tokens, 2 epochs; in 4 microbatches") and "DoRA, r = 4" in law
    assert (
        med.startswith("med: 3 optimizer steps, 6 samples, ")
        and " tokens, 3 epochs; in 3 micro" in med
        and "LoRA, r = 2" in med
    )


def test_memory_and_time_of_a_gpu(folder, capsys):
    toml = folder / "jobs.toml"
    toml.write_text(toml.read_text().replace("float32", "bfloat16"))
    assert main(["plan", str(toml), "--gpu", "h200"]) == 0
    said = capsys.readouterr().out
    linears = 2 * 4 * 32 * 32 + 2 * 3 * 32 * 48
    assert f"linears      {linears / 2**30:.3f} GiB" in said and "activations" in said and "H200 SXM: 1" in said
    assert " GiB, about " in said
    assert main(["plan", str(toml), "--gpu", "4090"]) == 0
    assert "RTX 4090: 23.5 GiB" in (said := capsys.readouterr().out) and "about" not in said  # no measured rates
    assert main(["train", str(toml), "--gpu", "4090"]) == 0 and capsys.readouterr().out == said  # nothing is trained
    assert not (folder / "out").exists()


def test_a_pipeline_is_planned_as_it_will_run(folder, capsys, monkeypatch):
    """Its schedule keeps batches of an adapter apart; its bubble is said, and its stages are painted."""
    toml, painted = folder / "jobs.toml", []
    monkeypatch.setattr(command, "draw", lambda line, *args, **how: painted.append((line, how["title"])))
    toml.write_text("stages = 2\n" + toml.read_text().replace("float32", "bfloat16"))
    assert main(["plan", str(toml), "--gpu", "h200", "--picture", "plan.png"]) == 0
    ((line, title),), said = painted, capsys.readouterr().out
    assert line.devices == 2 and line.bubble > 0 and least_distance(line.microbatches) == 2
    assert f"bubble of 1F1B {line.bubble:.1%} in 2 stages" in said and f"bubble {line.bubble:.1%}" in title
    assert "2 x H200 SXM: 1" in said and "capacity 32: as given" in said
    toml.write_text(toml.read_text().replace("stages = 2\n", ""))
    assert main(["train", str(toml)]) == 0  # and what runs with fewer in flight can be planned still
    toml.write_text("stages = 2\n" + toml.read_text())
    assert main(["plan", str(toml)]) == 0 and "to do: 0 of" in capsys.readouterr().out


def least_distance(microbatches):
    """The least distance between two batches of an adapter."""
    found = [(a, j, p) for p, each in enumerate(microbatches) for a, j in batches_of(each)]
    return min(q - p for a, j, p in found for b, k, q in found if (a, j + 1) == (b, k))


@pytest.mark.parametrize("command", ["plan", "train"])
def test_what_dropout_means_is_planned_and_trained(folder, capsys, command):
    toml = folder / "jobs.toml"
    toml.write_text(toml.read_text().replace("capacity", 'dropout_mode = "none"\ncapacity'))
    with pytest.raises(SystemExit, match="2"):
        main([command, str(toml)])
    assert "`dropout_mode` must be 'peft' or 'lora', got 'none'" in capsys.readouterr().err


def test_a_job_that_is_new_in_the_file(folder, capsys):
    """What ended before stays as it was."""
    toml = folder / "jobs.toml"
    whole = toml.read_text()
    toml.write_text(whole[: whole.index("[jobs.med]")])
    assert main(["train", str(toml)]) == 0
    before = (folder / "out" / "law" / "adapter_model.safetensors").read_bytes()
    toml.write_text(whole)
    capsys.readouterr()
    assert main(["plan", str(toml)]) == 0 and "to do: 3 of 7 microbatches" in capsys.readouterr().out
    assert main(["train", str(toml)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("med ") for line in said) == 3 and not any(line.startswith("law ") for line in said)
    assert (folder / "out" / "law" / "adapter_model.safetensors").read_bytes() == before
    assert (folder / "out" / "med").exists()


def test_where_peft_saves_an_adapter_named_default(folder, capsys):
    toml = folder / "jobs.toml"
    toml.write_text(toml.read_text().replace("[jobs.law]", "[jobs.default]"))
    assert main(["train", str(toml)]) == 0
    assert f"saved: {folder}/out, {folder}/out/med" in capsys.readouterr().out
    assert (folder / "out" / "adapter_model.safetensors").exists()


def test_what_diverges_is_not_saved(folder, capsys):
    toml = folder / "jobs.toml"
    toml.write_text(toml.read_text().replace("lr = 0.01", "lr = 1e30"))
    assert main(["train", str(toml)]) == 1
    said = capsys.readouterr().out
    assert f"saved: {folder}/out/law" in said and "not saved: med, which diverged after 1 steps" in said
    assert (folder / "out" / "law").exists() and not (folder / "out" / "med").exists()


def test_a_prompt_has_no_labels(folder):
    from transformers import AutoTokenizer

    from fdora.jobs.causal.__main__ import sample_of

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    got = sample_of("a", {"prompt": "the court", "completion": "holds that"}, lambda: tokenizer)
    assert got == {"input_ids": [0, 2, 3, 4, 5, 1], "labels": [-100, -100, -100, 4, 5, 1]}
    assert sample_of("a", {"text": "a cell"}, lambda: tokenizer)["labels"] == [0, 6, 7, 1]
    tokenizer.eos_token = None
    with pytest.raises(FdoraError, match="`model` must be one whose tokenizer ends a sequence, got one without eos_token"):
        sample_of("a", {"text": "a cell"}, lambda: tokenizer)


def test_a_line_ends_where_json_does(tmp_path):
    """Not at what a string may hold as it is. Empty lines count."""
    from fdora.jobs.causal.__main__ import samples_of

    sample, path = {"input_ids": [1], "labels": [1], "of": "a\u2028b\x85c"}, tmp_path / "data.jsonl"
    path.write_text(json.dumps(sample, ensure_ascii=False) + "\n\n" + json.dumps(sample) + "\n")
    assert samples_of(str(path), None) == [sample, sample]
    path.write_text(path.read_text() + "{")
    with pytest.raises(FdoraError, match=r"data.jsonl, line 4` must be JSON, got JSONDecodeError"):
        samples_of(str(path), None)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr = 0.01", "", "got none of lr"),
        ("lr = 2e-2", "rate = 2e-2", "got unknown rate"),
        ("lr = 2e-2", 'lr = "fast"', "`jobs.law.lr` must be"),
        ("seed = 1", f"seed = {1 << 70}", "seed` must be an int from 0 to 2^32 - 1"),
        ("r = 4,", "rank = 4,", "what peft.LoraConfig takes"),
        ("law.jsonl", "no.jsonl", "must be lines of JSON"),
        ("float32", "float33", "must be float32, bfloat16 or float16"),
        ("[jobs.law]", "[jobs.law", "must be a TOML file"),
        ("/model", "/no model", "`model` must be a causal model of transformers"),
        ('"cpu"', '"gpu"', "`device` must be one that torch has here, got 'gpu'"),
        ("float32", "int64", "must be float32, bfloat16 or float16, got 'int64'"),
        ('["q_proj", "v_proj"]', '["nope"]', "`jobs.law.adapter` must be what peft.LoraConfig takes, got Target modules"),
        ("r = 4,", 'r = "4",', "`jobs.law.adapter` must be what peft.LoraConfig takes"),
        ("[jobs.law]", '[jobs."a.b"]', "`jobs.a.b.adapter` must be what peft.LoraConfig takes"),
    ],
)
def test_mistakes_are_one_sentence(folder, capsys, monkeypatch, old, new, said):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)  # nothing else is said
    path = folder / "jobs.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(SystemExit) as end:
        main(["train", str(path)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error and error.count("\n") == 1 and not (folder / "out").exists()
