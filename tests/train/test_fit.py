"""What the planner says of fdora.jobs.train, against what torch keeps of its forward on a CPU."""

import pytest
import torch

pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from fdora.jobs.causal.banks import norms_of, running
from fdora.jobs.causal.data import pack
from fdora.jobs.causal.fit import DEFAULT, Choice, chosen, memory_of, most, terms_of
from fdora.jobs.causal.records import TrainJob
from fdora.jobs.causal.runs import losses_of
from fdora.jobs.causal.whole import prepared, train
from fdora.jobs.loop import Job
from fdora.jobs.plan import card
from fdora.jobs.schedule import Spec, schedule
from tests.memory import held_bytes

NAMES = ("law", "med")


def model_of(dropout=0.0, dtype=torch.bfloat16, attention="sdpa", **change):
    sizes = dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    config = LlamaConfig(**sizes | change, vocab_size=512)
    config._attn_implementation = attention
    how = {"target_modules": "all-linear", "lora_dropout": dropout}
    torch.manual_seed(0)
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
    model = model_of(dropout)
    layers, banks, course, *_ = prepared(model, jobs_of(), 256)
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
    terms = terms_of(model, layers, banks, NAMES, course.reads)
    assert len(packed.ids) == 256 and terms.setup.loss_of(256) == 4 * 48 + 0
    assert memory_of(terms, 256).activations == pytest.approx(kept, rel=0.02)


def test_the_most_that_fits():
    """Adapters and gradients are there twice; 256 tokens more would not fit."""
    ready = prepared(model := model_of(), jobs_of(), 256)
    layers, banks, course, *_ = ready
    terms = terms_of(model, layers, banks, NAMES, course.reads)
    small = card("h200")._replace(bytes=2**29)
    tokens, why = most(lambda: terms, small)
    budget = small.bytes * 0.94
    assert 256 < tokens < 2**20 and tokens % 256 == 0 and "by the planner" in why
    assert memory_of(terms, tokens).peak <= budget < memory_of(terms, tokens + 256).peak
    rows = sum(t.numel() for bank in ready.banks.values() for t in bank.params)
    assert memory_of(terms, 256).adapters == 2 * 4 * rows and memory_of(terms, 256).gradients == 2 * 4 * rows
    for card_, find in (
        (None, None),
        (small, lambda: terms_of(model_of(attention="eager"), layers, banks, NAMES, course.reads)),
    ):
        assert most(find, card_).tokens == DEFAULT


def test_fewest_empty_places():
    """What is chosen is best by schedules made here; of equals the largest; between the longest sample and what can be used."""
    lengths = [[[700, 400, 300], [900, 120]] * 3, [[650, 650], [333] * 5] * 4]
    best, why = chosen(lengths, 900, Choice(2000, "a limit"))
    tried = [2000 * n // 8 for n in range(8, 5, -1)]
    first = [batches[:8] for batches in lengths]
    empty = {n: len(schedule(first, Spec(n, seconds=0)).microbatches) * n for n in tried}
    assert len(set(empty.values())) > 1 and best == min(empty, key=empty.get) and "at most 2000, a limit" in why
    assert chosen(lengths, 3000, Choice(2000, ""))[0] == 3000  # of an evaluation
    assert chosen([[[64, 64], [64]], [[64]]], 64, Choice(10**6, ""))[0] == 144  # twice 128, as of 192
    assert chosen([[[64]]], 64, Choice(0, "nothing fits")) == chosen([[[64]]], 64, Choice(1, "nothing fits"))._replace(
        why="at most 64, the longest sample; nothing fits: 0; empty places in 8 batches of each adapter: 64 leave 0"
    )


def test_it_is_what_train_takes():
    """64 + 64 of each of two adapters are together at most."""
    ready = prepared(model_of(), jobs_of(), None)
    assert ready.course.schedule.spec.capacity == 256 and "one batch of each adapter" in ready.why
    found, wanted = (train(model_of(dtype=torch.float32), jobs_of(), **given) for given in ({}, {"capacity": 256}))
    assert found == wanted and len(found.losses["law"]) == 2
