"""What the planner says of fdora.jobs.train, against what torch keeps of its forward on a CPU."""

import math

import pytest
import torch

pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from fdora.jobs.causal import fit
from fdora.jobs.causal.banks import norms_of, running
from fdora.jobs.causal.data import TrainJob, pack
from fdora.jobs.causal.fit import DEFAULT, Choice, chosen, memory_of, most, terms_of
from fdora.jobs.causal.runs import losses_of
from fdora.jobs.causal.whole import prepared, train
from fdora.jobs.loop import Job
from fdora.jobs.plan import card
from fdora.jobs.schedule import Spec, schedule, simulate
from tests.memory import held_bytes

NAMES = ("law", "med")


def model_of(dropout=0.0, dtype=torch.bfloat16, attention="sdpa", targets="all-linear", **change):
    sizes = dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    config = LlamaConfig(**sizes | change, vocab_size=512)
    config._attn_implementation = attention
    how = {"target_modules": targets, "lora_dropout": dropout}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=8, use_dora=True, **how), adapter_name="law")
    model.add_adapter("med", LoraConfig(r=4, use_dora=True, **how))
    return model


def jobs_of():
    sample = {"input_ids": [5] * 64, "labels": [-100] * 16 + [5] * 48}
    return [TrainJob(Job(name, 1e-3), [sample] * 4, batch=2) for name in NAMES]


@pytest.mark.parametrize("how", [{}, {"dropout": 0.1}, {"targets": ["q_proj", "down_proj"]}], ids=str)
def test_forward_keeps_what_is_said(how):
    """Packed: a mask of all tokens by all tokens in each layer. Of an activation its inputs alone: of torch's f(gate), too."""
    model = model_of(**how)
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


def test_what_takes_least_is_chosen():
    """By a clock on which a microbatch takes 1 s, and 1 s for each 10 tokens from 49 on; what does not fit is not taken."""
    lengths, asked = [[[12] * 8] * 2, [[8] * 4] * 2], []

    def took(microbatches):
        asked.append(max(sum(sample.length for sample in each) for each in microbatches))
        return math.inf if asked[-1] > 100 else len(microbatches) * (1.0 + max(0, asked[-1] - 48) / 10)

    best, why = chosen(lengths, 12, Choice(10**6, "all of it"), took=took)
    assert asked == [128, 112, 96, 64, 32]  # all samples of 12 and 8 tokens together: 128 fit one batch of each
    counts = {n: len(schedule(lengths, Spec(n, seconds=0)).microbatches) for n in (96, 64, 32)}
    found = {96: counts[96] * 5.8, 64: counts[64] * 2.6, 32: counts[32] * 1.0}
    assert best == min(found, key=found.get) == 32 and "seconds of 8 batches of each adapter: 128 take inf" in why


def test_a_pipeline_is_chosen_by_its_simulation():
    """One adapter alone waits for its own step: smaller microbatches leave fewer gaps, until their messages cost more."""
    lengths = [[[700] * 16] * 4]
    best, why = chosen(lengths, 700, Choice(6144, ""), 4)
    times = {}
    for n in (6144, 5376, 4608, 3072, 1536):
        found = schedule(lengths, Spec(n, 4, seconds=0))
        times[n] = simulate(found, 4, forward=lambda each, _: sum(s.length for s in each) + 256 * bool(each)).time
    assert (
        best == min(times, key=times.get) < 3072
        and f"on 4 stages of 8 batches of each adapter: 6144 take {times[6144]:.6g}" in why
    )
    assert chosen(lengths, 700, Choice(6144, ""))[0] > 4096  # on one GPU none waits


def test_train_times_by_the_clock_it_is_given(monkeypatch, tmp_path, caplog):
    """The bits are those of the capacity that it finds. Asked again it goes on with that one, whatever the clock says now."""
    now, ran, forward = [0.0], [], fit.losses_of

    def timed(logits, params, norms, packed):
        now[0] += 1e3 * (len(packed.ids) not in ran)  # as if it compiled
        ran.append(len(packed.ids))
        now[0] += 1.0 if len(packed.ids) <= 128 else 50.0  # of 8 a microbatch of 128 takes the place of 4 of 256
        return forward(logits, params, norms, packed)

    monkeypatch.setattr(fit, "losses_of", timed)
    how = {"dtype": torch.float32, "dropout": 0.1}
    model = model_of(**how)
    caplog.set_level("INFO", "fdora.jobs")
    found = train(model, jobs_of(), folder=tmp_path, clock=lambda: now[0])
    assert "capacity 128: at most 256, one batch of each adapter; seconds of 8 batches of each adapter: 256 take" in caplog.text
    assert {*ran} == {256, 192, 128, 64} and all(ran.count(n) == 3 * (1 + (n == 192)) for n in {*ran})
    assert found == train(other := model_of(**how), jobs_of(), capacity=128)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    ran.clear()
    assert found == train(model_of(**how), jobs_of(), folder=tmp_path, clock=lambda: 0.0) and not ran


@pytest.mark.parametrize("fits", [0, 2])
def test_what_does_not_fit_takes_for_ever(fits, monkeypatch):
    """At any time: what is left in pieces is not seen by the first."""
    ran, forward = [], fit.losses_of

    def full(*args):
        ran.append(args)
        if len(ran) > fits:
            raise torch.OutOfMemoryError
        return forward(*args)

    monkeypatch.setattr(fit, "losses_of", full)
    layers, banks, course, *_ = prepared(model := model_of(), jobs_of(), 256)
    assert fit.timer_of(model, layers, banks, course, lambda: 0.0)([course.works[0].samples]) == math.inf
    assert fit.clock_of(torch.device("cpu")) is fit.clock_of(torch.device("meta")) is None
