"""What the planner says of fdora.jobs.train, against what torch keeps of its forward on a CPU."""

import pytest
import torch

pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from fdora.jobs.causal.banks import layers_of, norms_of, running
from fdora.jobs.causal.data import pack
from fdora.jobs.causal.fit import memory_of, terms_of
from fdora.jobs.causal.records import TrainJob
from fdora.jobs.causal.whole import course_of_all, losses_of
from fdora.jobs.loop import Job
from tests.memory import held_bytes

NAMES = ("law", "med")


def model_of(dropout=0.0, dtype=torch.bfloat16, attention="sdpa", **change):
    sizes = dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    config = LlamaConfig(**sizes | change, vocab_size=512)
    config._attn_implementation = attention
    how = {"target_modules": "all-linear", "lora_dropout": dropout}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=8, use_dora=True, **how), adapter_name="law")
    model.add_adapter("med", LoraConfig(r=4, use_dora=True, **how))
    return model


def jobs_of(length=64, labels=48, batch=2):
    sample = {"input_ids": [5] * length, "labels": [-100] * (length - labels) + [5] * labels}
    return [TrainJob(Job(name, 1e-3), [sample] * 4, batch=batch) for name in NAMES]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_forward_keeps_what_is_said(dropout):
    """Packed: a mask of all tokens by all tokens in each layer."""
    model, course = model_of(dropout), course_of_all(jobs_of(), 256)
    layers, banks = layers_of(model, NAMES)
    work = course.works[0]
    packed = pack(course, work, torch.device("cpu"))._replace(seed=1)
    params = {
        path: bank.params._replace(**{k: t.requires_grad_() for k, t in bank.params._asdict().items()})
        for path, bank in banks.items()
    }
    norms = norms_of(layers, params)
    with running(model, layers) as logits:
        losses_of(logits, params, norms, packed)
        kept = held_bytes(lambda: losses_of(logits, params, norms, packed))
    terms = terms_of(model, layers, NAMES, 4, course.reads)
    assert len(packed.ids) == 256 and terms.setup.loss_of(256) == 4 * 48 + 0
    assert memory_of(terms, 256).activations == pytest.approx(kept, rel=0.02)
