"""TRL needs no file of its own: its trainers take a PEFT model. Here its SFTTrainer trains one, stock and through fdora."""

import re

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed; `make test` installs it")

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from fdora.integrations.peft import report, use_fdora
from tests.integrations import tiny
from tests.integrations.models import perturb
from tests.snippets import execute


class Losses(SFTTrainer):
    """The loss of every forward; the log rounds it."""

    def compute_loss(self, *args, **kwargs):
        out = super().compute_loss(*args, **kwargs)
        self.losses.append((out[0] if isinstance(out, tuple) else out).item())
        return out


def trainer(folder, steps, dropout=0.0, model=None, **config):
    config = {"per_device_train_batch_size": 2, "gradient_checkpointing": False, "learning_rate": 1e-3} | config
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        max_length=64,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        seed=0,
        **config,
    )
    made = Losses(
        model=model or tiny.llama(),
        args=config,
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict({"text": tiny.lines(40)}),
        peft_config=LoraConfig(use_dora=True, lora_dropout=dropout, task_type="CAUSAL_LM", **tiny.LORA),
    )
    made.losses = []
    torch.manual_seed(1)
    perturb(made.model)
    return made


def trained(made):
    made.train()
    return torch.tensor(made.losses), {n: p.detach().clone() for n, p in made.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "config",
    [{}, {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}],
    ids=["plain", "accumulation and checkpointing"],
)
def test_fifty_steps_are_pefts(config, tmp_path):
    wanted, want = trained(trainer(tmp_path, 50, **config))
    ours = trainer(tmp_path, 50, **config)
    use_fdora(ours.model)
    losses, got = trained(ours)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-5)
    assert losses[-10:].mean() < 0.98 * losses[:10].mean()
    tiny.same_adapter(got, want)
    rows = report(ours.model)
    assert len(rows) == tiny.LAYERS
    twice = 2 if "gradient_checkpointing" in config else 1
    assert all(row.fused == twice * len(losses) and not row.fallbacks for row in rows), rows


def test_the_snippet(tmp_path):
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=1, max_length=64, use_cpu=True, bf16=False, report_to=[], save_strategy="no"
    )
    data = Dataset.from_dict({"text": tiny.lines(8)})
    space = execute("TRL", model=tiny.llama(), args=args, data=data, tokenizer=tiny.tokenizer())
    rows = report(space["trainer"].model)
    assert rows and all(row.fused for row in rows)


def test_readmes_program(tmp_path, monkeypatch):
    """As it stands, on a small model and text of its own: with fdora it trains, and it saves PEFT's adapter."""
    import datasets
    import trl

    (program,) = re.findall(r"```python\n(from datasets.*?)```", tiny.TEXT, re.S)
    given = {"processing_class": tiny.tokenizer()}
    small = {"max_steps": 2, "max_length": 64, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Dataset.from_dict({"text": tiny.lines(8)}))
    monkeypatch.setattr(trl, "SFTConfig", lambda **said: SFTConfig(**(said | small)))
    monkeypatch.setattr(trl, "SFTTrainer", lambda **said: SFTTrainer(**(said | given | {"model": tiny.llama()})))
    monkeypatch.chdir(tmp_path)
    space, said = {"__name__": "readme"}, []
    exec(compile(program.replace("print(", "said.append("), "README.md", "exec"), space | {"said": said}, space)
    (rows,) = said
    assert rows and all(row.fused for row in rows)
    assert all(row.backend == "stock" for row in report(space["trainer"].model))
    assert (tmp_path / "adapter/adapter_model.safetensors").exists() and len(program.splitlines()) <= 20
