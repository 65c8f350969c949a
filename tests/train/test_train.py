"""fdora.jobs.train against PEFT's own forward: one adapter at a time, one sample at a time, PyTorch's AdamW."""

import contextlib
import copy
import functools
import logging

import pytest
import torch

pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")

from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    masking_utils,
)

from fdora import FdoraError
from fdora.eager.dropout import drop
from fdora.integrations._peft.blocks import Shared
from fdora.jobs import TrainJob, train
from fdora.jobs.causal import runs
from fdora.jobs.causal.banks import one_of
from fdora.jobs.loop import Job

VOCAB = 61
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64}
WINDOW = {"sliding_window": 5}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, **WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, **WINDOW, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
MIXTURES = ("qwen3_moe", "mixtral")
ADAPTERS = {  # another rank, alpha, kind and choice of layers each
    "law": LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
    "med": LoraConfig(r=3, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "v_proj", "o_proj"]),
    "code": LoraConfig(r=2, use_dora=True, use_rslora=True, target_modules=["q_proj", "up_proj"]),
}
ON_ATTENTION = {name: copy.copy(each) for name, each in ADAPTERS.items()}
ON_ATTENTION["law"].target_modules, ON_ATTENTION["code"].target_modules = {"q_proj", "v_proj"}, {"q_proj", "k_proj"}


def model_of(family="llama", adapters=ADAPTERS, **change):
    """The same weights on every call; B away from its zeros."""
    torch.manual_seed(1)
    config = CONFIGS[family]()
    config.update(change)
    if family in MIXTURES and adapters is ADAPTERS:
        adapters = ON_ATTENTION
    names = iter(adapters.items())
    name, first = next(names)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), copy.deepcopy(first), adapter_name=name)
    for name, each in names:
        model.add_adapter(name, copy.deepcopy(each))
    for path, p in model.named_parameters():
        if ".lora_B." in path or path.endswith(".bias"):
            p.data.normal_(std=0.05)
    return model


def data_of(seed, count):
    """Of other lengths; labels skip a prompt, and here and there one more."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for n in torch.randint(4, 14, (count,), generator=g).tolist():
        ids = torch.randint(VOCAB, (n,), generator=g)
        found.append({"input_ids": ids.tolist(), "labels": [-100, -100, *ids[2:]]})
    found[0]["labels"][2] = -100
    return found


def jobs_of():
    return [
        TrainJob(Job("law", 3e-3, clip=0.5, weight_decay=0.1), data_of(0, 7), batch=3, epochs=2, evaluation=data_of(9, 5)),
        TrainJob(Job("med", lambda step: 5e-3 / (1 + step), weight_decay=0.2), data_of(1, 5), batch=2, steps=4, seed=3),
        TrainJob(Job("code", 2e-3, eps=1e-6), data_of(2, 4), batch=1, evaluation=data_of(8, 2), evaluate=2),
    ]


def batches_of(each):
    """Written anew: orders of epochs, cut."""
    data, found, epoch = each.data, [], 0
    steps = each.steps or each.epochs * -(-len(data) // each.batch)
    while len(found) < steps:
        order = range(len(data))
        if each.seed is not None:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(each.seed + epoch)).tolist()
        found += [[data[i] for i in order[at : at + each.batch]] for at in range(0, len(data), each.batch)]
        epoch += 1
    return found[:steps]


def loss_of(model, samples):
    """Over all labels of these samples, which go through the model one by one."""
    total, count = 0.0, 0
    for sample in samples:
        logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(sample["labels"][1:])
        total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return total / count


def alone(model, each):
    """PEFT's and PyTorch's loop with this adapter active: losses of its batches, evaluations, parameters."""
    job = each.job
    model.set_adapter(job.name)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=job.rate(0), eps=job.eps, weight_decay=job.weight_decay)
    losses, evaluations, batches = [], {}, batches_of(each)
    for step, batch in enumerate(batches):
        loss = loss_of(model, batch)
        loss.backward()
        if job.clip is not None:
            nn.utils.clip_grad_norm_(own, job.clip)
        for group in optimizer.param_groups:
            group["lr"] = job.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if each.evaluation and (step + 1 == len(batches) or (each.evaluate and (step + 1) % each.evaluate == 0)):
            with torch.no_grad():
                evaluations[step + 1] = loss_of(model, each.evaluation).item()
    return losses, evaluations


def parameters(model, name):
    return {path: p.detach() for path, p in model.named_parameters() if f".{name}." in path}


def as_alone(trained, jobs, model, made=model_of):
    """Losses, evaluations and parameters of each job are those of PEFT's own loop on what ``made()`` gives."""
    for each in jobs:
        name, stock = each.job.name, made()
        losses, evaluations = alone(stock, each)
        assert trained.losses[name] == pytest.approx(losses, rel=2e-5)
        assert trained.evaluations[name] == pytest.approx(evaluations, rel=2e-5)
        wanted, start = parameters(stock, name), parameters(made(), name)
        for path, p in parameters(model, name).items():
            moved = (p - start[path]).abs().max()
            assert moved > 1e-3 and (p - wanted[path]).abs().max() < 0.02 * moved, path


@pytest.mark.parametrize("family", CONFIGS)
def test_each_adapter_trains_as_alone(family, caplog):
    model, jobs, seen = model_of(family), jobs_of(), []
    with caplog.at_level(logging.INFO, logger="fdora.jobs"):
        trained = train(model, jobs, capacity=40, on_step=seen.append)
    as_alone(trained, jobs, model, functools.partial(model_of, family))
    for each in jobs:
        name, own = each.job.name, [step for step in seen if step.name == each.job.name]
        assert {s.steps for s in own} == {len(batches_of(each))} and [step.step for step in own] == list(range(1, len(own) + 1))
        assert [step.loss for step in own] == list(trained.losses[name])
        assert [step.rate for step in own] == [each.job.rate(n) for n in range(len(own))]
        assert {s.step: s.evaluation for s in own if s.evaluation is not None} == trained.evaluations[name]
    assert sum("loss" in record.getMessage() for record in caplog.records) == len(seen)


class Stop(Exception):
    pass


class Until(list):
    """Data that can be read so often."""

    left = 0

    def __getitem__(self, i):
        self.left -= 1
        if self.left < 0:
            raise Stop
        return super().__getitem__(i)


def same(one, other):
    for name in ADAPTERS:
        theirs = parameters(other, name)
        assert all(torch.equal(p, theirs[path]) for path, p in parameters(one, name).items())


DROPOUT = {"law": 0.3, "med": 0.0, "code": 0.1}


def with_dropout():
    model = model_of()
    for path, module in model.named_modules():
        if path.endswith(".lora_dropout"):
            for name in set(module) & {name for name, p in DROPOUT.items() if p}:
                module[name] = nn.Dropout(DROPOUT[name])
    return model


class Drawn(nn.Module):
    """The mask of the n-th layer of a microbatch with tokens of one adapter."""

    at = 0

    def __init__(self, p, n, layers):
        super().__init__()
        self.p, self.n, self.layers = p, n, layers

    def forward(self, x):
        seed = Drawn.at * self.layers + self.n
        return drop(x[0], torch.tensor(seed), self.p)[None] if self.training else x


@pytest.mark.parametrize("name", ["law", "med"])
def test_dropout_is_that_of_peft(name, monkeypatch):
    """With masks of its own in the place of PEFT's, and without any where it evaluates."""
    adapters = {name: copy.deepcopy(ADAPTERS[name])}
    adapters[name].lora_dropout = 0.4
    each = TrainJob(Job(name, 1e-2), data_of(4, 5), batch=1, evaluation=data_of(9, 3))
    model, stock = model_of(adapters=adapters), model_of(adapters=adapters)
    trained = train(model, [each], capacity=13, seed=2)
    assert trained.losses != train(model_of(adapters=adapters), [each], capacity=13).losses
    layers = [module for _, module in stock.named_modules() if hasattr(module, "lora_dropout") and name in module.lora_A]
    for n, layer in enumerate(layers):
        layer.lora_dropout[name] = Drawn(0.4, n, len(layers))
    losses, count = [], iter(range(2 * 5, 3 * 5))
    optimizer = torch.optim.AdamW(
        [p for p in stock.parameters() if p.requires_grad], lr=1e-2, weight_decay=each.job.weight_decay
    )
    for sample in each.data:
        monkeypatch.setattr(Drawn, "at", next(count))
        loss = loss_of(stock, [sample])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert trained.losses[name] == pytest.approx(losses, rel=2e-5)
    assert trained.evaluations[name][5] == pytest.approx(loss_of(stock.eval(), each.evaluation).item(), rel=2e-5)


def test_weights_of_four_bits():
    """nf4 of bitsandbytes. K is whole blocks: others it reads wrongly on some CPUs."""
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes; `make test` installs it")
    parts = ["q_proj", "v_proj", "o_proj", "up_proj"]

    def made():
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
        for path, module in [*base.named_modules()]:
            if path.rpartition(".")[2] in parts:
                sizes = module.in_features, module.out_features
                coded = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                coded.weight.data = module.weight.data
                base.set_submodule(path, coded.to("cpu"))
        base.is_loaded_in_4bit = True
        model = get_peft_model(base, LoraConfig(r=4, use_dora=True, target_modules=parts), adapter_name="law")
        model.add_adapter("med", LoraConfig(r=2, target_modules=parts))
        return model

    jobs = [TrainJob(Job(name, 1e-2), data_of(n, 4), batch=2) for n, name in enumerate(("law", "med"))]
    trained = train(made(), jobs, capacity=40)
    for each in jobs:
        losses, _ = alone(made().train(), each)
        assert trained.losses[each.job.name] == pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("model_of", [model_of, with_dropout], ids=["plain", "dropout"])
def test_resumed_to_the_bit(model_of, tmp_path):
    """Stopped in the middle of batches, and again: parameters, losses and evaluations are those of a run without a stop."""
    jobs, whole, model = jobs_of(), model_of(), model_of()
    wanted, steps = train(whole, jobs, capacity=16), []

    for count in (7 + 2, 7 + 3, 7 + 6):  # once for lengths, then in training
        data = Until(jobs[0].data)
        data.left = count
        with pytest.raises(Stop):
            train(model, [jobs[0]._replace(data=data), *jobs[1:]], capacity=16, folder=tmp_path, every=1, on_step=steps.append)
        same(model, model_of())
        assert any(t.any() for t in torch_file(tmp_path, "grads"))  # in the middle of somebody's batch
    found = train(model, jobs, capacity=16, folder=tmp_path, on_step=steps.append)
    assert found == wanted and len(steps) == sum(map(len, wanted.losses.values()))
    same(model, whole)
    again = model_of()
    assert train(again, jobs, capacity=16, folder=tmp_path, on_step=lambda step: pytest.fail("it was done")) == wanted
    same(again, whole)
    with pytest.raises(FdoraError, match=r"fdora.jobs.train: `folder` must be of this training, or new, got another schedule"):
        train(again, jobs, capacity=17, folder=tmp_path)


@pytest.mark.parametrize("reads", [2, 3, 99])
def test_a_job_that_joins(reads, tmp_path):
    """law, of another rank and on more layers than those that train, or have trained: each is as alone, and goes on as usual."""
    law, *first = jobs_of()
    data = Until(first[0].data)
    data.left = len(data) + reads
    given = {"capacity": 16, "folder": tmp_path, "every": 1}
    steps = []
    given["on_step"] = steps.append
    with pytest.raises(Stop) if reads < 99 else contextlib.nullcontext():
        train(model_of(), [first[0]._replace(data=data), first[1]], **given)
    assert any(t.any() for t in torch_file(tmp_path, "grads")) == (reads == 3)  # in the middle of a batch
    seen = len(steps)
    assert 0 < seen <= sum(map(len, map(batches_of, first)))
    model, jobs = model_of(), [law, *first]
    again, data = model_of(), Until(law.data)
    kept = (tmp_path / "training.safetensors").read_bytes()
    trained = train(model, jobs, **given)
    as_alone(trained, jobs, model)
    assert len(steps) == sum(map(len, trained.losses.values()))  # none is taken twice
    (tmp_path / "training.safetensors").write_bytes(kept)
    data.left = len(data) + 2
    with pytest.raises(Stop):
        train(again, [law._replace(data=data), *first], **given)
    assert train(again, jobs, **given | {"capacity": None}) == trained  # to the bit
    same(again, model)
    for less in (first, [law._replace(batch=2), *first]):
        with pytest.raises(FdoraError, match="`folder` must be of this training, or new, got another schedule"):
            train(again, less, **given)


def joining(given, seen):
    """A model with med alone, and what gives each job of ``given`` when so many were seen, whose adapter is made then."""
    model, whole = model_of(adapters={"med": ADAPTERS["med"]}), model_of()
    model.load_state_dict(whole.state_dict(), strict=False)

    def join():
        more = [given.pop()[0]] if given and len(seen) >= given[-1][1] else []
        for each in more:
            name = each.job.name
            model.add_adapter(name, copy.deepcopy(ADAPTERS[name]))
            for path, p in parameters(whole, name).items():
                model.get_parameter(path).data.copy_(p)
        return more

    return model, join


def test_jobs_join_while_others_run(tmp_path):
    """law's adapter is made in between, by who gives its job; code joins when all others are done."""
    (law, med, code), steps = jobs_of(), []
    model, join = joining([(code, 4 + 6), (law, 2)], steps)  # a job, and the steps that are seen before
    trained = train(model, [med], capacity=40, folder=tmp_path, on_step=steps.append, join=join)
    as_alone(trained, (law, med, code), model)
    assert [step.name for step in steps[:2]] == ["med"] * 2 and len(steps) == sum(map(len, trained.losses.values()))
    with pytest.raises(FdoraError, match="`folder` must be given with join, got None"):
        train(model, [med], join=join)


def torch_file(folder, part):
    from safetensors.torch import load_file

    return [t for key, t in load_file(folder / "training.safetensors").items() if key.startswith(part)]


def diverging():
    jobs = jobs_of()
    jobs[0] = jobs[0]._replace(job=Job("law", lambda step: 3e-3 if step < 2 else 1e30), steps=6)
    return jobs


def left(model, found, jobs):
    """The others train as without it, though their samples lie in the same microbatches."""
    wanted = train(model_of(), jobs[1:], capacity=40)
    assert found.diverged == {"law": 3} and len(found.losses["law"]) == 3
    for name in ("med", "code"):
        assert found.losses[name] == pytest.approx(wanted.losses[name], rel=2e-5)
    before = parameters(model_of(), "law")
    assert all(torch.equal(p, before[path]) for path, p in parameters(model, "law").items())


@pytest.mark.parametrize("resumed", [False, True])
def test_what_diverges_leaves(resumed, tmp_path, caplog):
    jobs, model = diverging(), model_of()
    if resumed:
        data = Until(jobs[2].data)
        data.left = len(jobs[2].data) + 3
        with pytest.raises(Stop):
            train(model, [*jobs[:2], jobs[2]._replace(data=data)], capacity=40, folder=tmp_path, every=1)
    left(model, train(model, jobs, capacity=40, folder=tmp_path, every=1), jobs)
    assert "law diverged after 3 steps" in caplog.text
    assert not any(
        torch.equal(p, q)
        for p, q in zip(parameters(model, "med").values(), parameters(model_of(), "med").values(), strict=True)
    )


def test_a_sample_without_labels_is_not_run():
    """Its loss, 0, would not show that its adapter has diverged: the samples beside it would seem to have."""
    g = torch.Generator().manual_seed(7)
    law, bare, med = (torch.randint(VOCAB, (n,), generator=g).tolist() for n in (12, 5, 8))  # bare and med come first
    whole = [{"input_ids": law, "labels": law}, {"input_ids": bare, "labels": [3] + [-100] * 4}] * 3
    diverges = TrainJob(Job("law", lambda step: 1e30), whole, batch=2)
    each = TrainJob(Job("med", 1e-2), [{"input_ids": med, "labels": med}] * 3, batch=1)
    trained = train(model_of(), [diverges, each], capacity=13)
    assert trained.diverged == {"law": 1} and trained.losses["med"] == pytest.approx(alone(model_of(), each)[0], rel=2e-5)


def test_what_diverges_in_its_last_step_leaves(tmp_path, caplog):
    """No loss shows it. What was done is the same when it is asked for again."""
    law, med, _ = jobs_of()
    law = law._replace(job=Job("law", lambda step: float("nan") if step == 1 else 1e-3), steps=2, evaluation=None)
    for _ in range(2):
        model = model_of()
        trained = train(model, [law, med], capacity=40, folder=tmp_path)
        assert trained.diverged == {"law": 2} and len(trained.losses["law"]) == 2 and len(trained.losses["med"]) == 4
        before = parameters(model_of(), "law")
        assert all(torch.equal(p, before[path]) for path, p in parameters(model, "law").items())
    assert caplog.text.count("law diverged after 2 steps") == 2


def test_what_is_finite_alone_leaves_too(monkeypatch):
    """Another mask of dropout may say so: it must come to an end."""
    losses_of = runs.losses_of

    def together(logits, params, norms, packed):
        found = losses_of(logits, params, norms, packed)
        return found * float("nan") if len(packed.ends.unique()) == len(packed.ends) else found

    monkeypatch.setattr(runs, "losses_of", together)
    assert train(model_of(), jobs_of(), capacity=40).diverged.keys() == ADAPTERS.keys()


def test_layers_on_one_x_are_computed_together():
    """What waits for a layer is for the same x, unchanged, in the same grad mode; each other call computes that layer alone."""
    calls, (q, k, v) = [], (nn.Identity() for _ in range(3))

    def run(x, modules):
        calls.append(len(modules))
        return [(10 * len(modules) + i) * x for i, _ in enumerate(modules)]

    shared, x, other = Shared([q, k, v], run), torch.ones(2), torch.full((2,), 3.0)

    def first(place, x):
        return one_of(shared, (q, k, v)[place], place, run, x)[0].item()

    assert [first(place, x) for place in range(3)] == [30, 31, 32] and calls == [3]
    first(0, x)
    assert first(1, other) == 30 and first(2, other) == 30 and calls == [3, 3, 1, 1]
    first(0, x)
    x.add_(1)
    assert first(1, x) == 20 and calls[4:] == [3, 1]
    first(0, x)
    with torch.no_grad():
        assert first(1, x) == 20 and calls[6:] == [3, 1]
    alone = Shared([q], run)
    assert one_of(alone, q, 0, run, x)[0] == 20 and alone.waiting is None  # it holds no x
    assert shared.waiting is None


def test_the_model_is_its_own_again():
    """Under activation checkpointing; jobs in another order than the adapters, and not all of them."""
    jobs, model = jobs_of()[2:0:-1], model_of()
    wanted, learn = train(model_of(), jobs, capacity=40), {path: p.requires_grad for path, p in model.named_parameters()}
    model.train()
    model.gradient_checkpointing_enable()
    assert train(model, jobs, capacity=40).losses == {name: pytest.approx(each) for name, each in wanted.losses.items()}
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert {path: p.requires_grad for path, p in model.named_parameters()} == learn
    before = parameters(model_of(), "law")
    assert all(torch.equal(p, before[path]) for path, p in parameters(model, "law").items())
    for each in jobs:
        losses, _ = alone(model_of(), each)
        assert wanted.losses[each.job.name] == pytest.approx(losses, rel=2e-5)
    model.set_adapter("code")
    assert loss_of(model, jobs[0].evaluation).item() == pytest.approx(wanted.evaluations["code"][4], rel=1e-5)


def test_a_model_that_fdora_fused():
    """Its blocks step aside while it is trained."""
    from fdora.integrations.peft import use_fdora

    parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = {"law": LoraConfig(r=2, use_dora=True, target_modules=parts)}
    model = use_fdora(model_of(adapters=adapters), fuse=True)
    trained = train(model, jobs_of()[:1], capacity=40)
    losses, _ = alone(model_of(adapters=adapters), jobs_of()[0])
    assert trained.losses["law"] == pytest.approx(losses, rel=2e-5)


ONE = {"law": ADAPTERS["law"]}


def with_adapter(**change):
    return lambda: model_of(adapters={"law": LoraConfig(**({"r": 2, "target_modules": ["q_proj"]} | change))})


def changed(change):
    def made():
        model = model_of(adapters=ONE)
        change(model)
        return model

    return made


def skip(model):
    model.get_submodule("base_model.model.model.layers.0.mlp").forward = lambda x: x


def halved(model):
    mlp = model.get_submodule("base_model.model.model.layers.0.mlp")
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x[:, :3])).sum() + x


def of_mixture(**change):
    return lambda: model_of("mixtral", {"law": LoraConfig(**({"r": 2, "target_modules": ["q_proj"]} | change))})


def classifier():
    return get_peft_model(AutoModelForSequenceClassification.from_config(CONFIGS["llama"]()), ONE["law"], adapter_name="law")


class Coded(nn.Linear):
    pass


def coded(model):
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer.__class__ = Coded


MODELS = {
    "no PEFT": (lambda: AutoModelForCausalLM.from_config(CONFIGS["llama"]()), "a PeftModel .*, got a LlamaForCausalLM"),
    "attention_dropout": (
        lambda: model_of(adapters=ONE, attention_dropout=0.2),
        "dropout or jitter of its own, got 0.2 at `.*self_attn`",
    ),
    "a head": (with_adapter(modules_to_save=["lm_head"]), r"frozen .*lm_head.modules_to_save.law.weight` with requires_grad"),
    "an embedding": (with_adapter(target_modules=["q_proj", "embed_tokens"]), "'law' adapts linear layers alone, got 2 other"),
    "a norm": (changed(lambda m: m.get_base_model().model.norm.requires_grad_(True)), "frozen but for its adapters, got"),
    "merged": (changed(lambda m: m.merge_adapter()), "without merged adapters, got some in .*q_proj`"),
    "codes": (changed(coded), "a weight below .*q_proj` that can be read, got a Coded"),
    "skipped": (changed(skip), "calls each adapted layer, got no call of .*layers.0.mlp.down_proj"),
    "a head's LoRA": (with_adapter(target_modules=["lm_head"]), "layers get all tokens, got 5 of 9 in .*lm_head`"),
    "some tokens": (
        changed(halved),
        "layers get all tokens, got 3 of 9 in .*layers.0.mlp.down_proj`. Adapt no head, no layers",
    ),
    "experts": (
        of_mixture(target_parameters=["mlp.experts.down_proj"]),
        "a weight below .*experts` .* Adapters of experts, rou",
    ),
    "a router": (of_mixture(target_modules=["gate"]), "a weight below .*gate` that can be read, got a MixtralTopKRouter"),
    "jitter": (lambda: model_of("mixtral", router_jitter_noise=0.1), "jitter of its own, got 0.1 at `.*mlp`"),
    "a balancing loss": (
        lambda: model_of("mixtral", output_router_logits=True),
        "without a loss of its router, got config.output_router_logits=True. Set it to False",
    ),
    "a classifier": (classifier, "a causal model of transformers .* got a LlamaForSequenceClassification, which lacks"),
    "all is dropped": (with_adapter(lora_dropout=1.0), "whose lora_dropout is below 1, got 1.0 at .*q_proj`"),
    "named as a part": (
        lambda: model_of(adapters=ONE | {"weight": ADAPTERS["med"]}),
        r"whose adapters are not named as parts of it, got \['law', 'weight'\]",
    ),
    "not finite": (
        changed(lambda m: m.get_base_model().model.norm.weight.data.fill_(float("inf"))),
        "whose outputs are finite, got some that are not",
    ),
    "another adapter": (with_adapter(), "`adapters` must be names of linear adapters, got .'nobody'"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_refused(case):
    make, message = MODELS[case]
    name = "nobody" if case == "another adapter" else "law"
    with pytest.raises(FdoraError, match=message):
        train(make(), [TrainJob(Job(name, 1e-3), data_of(0, 2))], capacity=40)


def test_samples_that_see_each_other_are_refused(monkeypatch):
    """As in a transformers that makes one sample of all, and where tokens see what comes."""
    job, message = [TrainJob(Job("law", 1e-3), data_of(0, 2))], "got a .*ForCausalLM, which lets packed samples, or earlier tok"
    with pytest.raises(FdoraError, match=message):
        train(model_of("gemma3", ONE, use_bidirectional_attention=True), job, capacity=40)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    for model in (model_of(adapters=ONE), of_mixture()()):
        with pytest.raises(FdoraError, match=message):
            train(model, job, capacity=40)
        assert not any("forward" in module.__dict__ for module in model.modules())


class Growing(list):
    """Longer at each reading."""

    def __getitem__(self, i):
        self.append(None)
        return {part: [5] * len(self) for part in ("input_ids", "labels")}


GOOD = TrainJob(Job("law", 1e-3), [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
JOBS = {
    "no job": (lambda: (GOOD.job,), r"`jobs\[0\]` must be a TrainJob, got a Job"),
    "none": (lambda: (), "`jobs` must be at least one Job"),
    "twice": (lambda: (GOOD, GOOD), "each with a name of its own"),
    "a stream": (
        lambda: (GOOD._replace(data=iter([])),),
        r"`jobs\[0\].data` must be a sequence of samples, got a list_iterator",
    ),
    "nothing": (lambda: (GOOD._replace(data=[]),), r"`jobs\[0\].data` must be a sequence of samples, got an empty one"),
    "no judge": (lambda: (GOOD._replace(evaluation=[]),), r"`jobs\[0\].evaluation` must be a sequence .* an empty one"),
    "batch": (lambda: (GOOD._replace(batch=0),), r"`jobs\[0\].batch` must be a positive int, got 0"),
    "steps": (lambda: (GOOD._replace(steps=0),), r"`jobs\[0\].steps` must be a positive int, got 0"),
    "seed": (
        lambda: (GOOD._replace(seed=1 << 70),),
        r"`jobs\[0\].seed` must be an int from 0 to 2\^32 - 1, got 1180591620717411303424",
    ),
    "evaluate": (lambda: (GOOD._replace(evaluate=-1),), r"`jobs\[0\].evaluate` must be an int of 0 or more, got -1"),
    "rate": (
        lambda: (GOOD._replace(job=Job("law", float("nan"))),),
        r"`jobs\[0\].lr` must be a function, or a finite .* got nan",
    ),
    "text": (lambda: (GOOD._replace(data=["text"]),), r"`jobs\[0\].data\[0\]` must be a sample .* got TypeError"),
    "no labels": (lambda: (GOOD._replace(data=[{"input_ids": [1]}]),), r"`jobs\[0\].data\[0\]` .* got KeyError: 'labels'"),
    "fewer": (lambda: (GOOD._replace(data=[GOOD.data[0] | {"labels": [1]}]),), r"\(n,\) labels, n > 0, got \(3,\) and \(1,\)"),
    "uncounted": (
        lambda: (GOOD._replace(data=[*GOOD.data, {"input_ids": [1], "labels": [1]}], batch=1),),
        r"`jobs\[0\].data` must be such that each batch has a label, got none in samples \[1\]",
    ),
    "long": (
        lambda: (GOOD._replace(data=[*GOOD.data, {part: [1] * 41 for part in GOOD.data[0]}], seed=1),),
        r"`jobs\[0\].data\[1\]` must be at most 40 tokens, the capacity, got 41",
    ),
    "no word": (
        lambda: (GOOD._replace(data=[GOOD.data[0] | {"input_ids": [1, 2, VOCAB]}]),),
        rf"`jobs\[0\].data\[0\]` must be of numbers from 0 to {VOCAB - 1}, got 1 to {VOCAB}",
    ),
    "no label of the vocabulary": (
        lambda: (GOOD._replace(evaluation=[GOOD.data[0] | {"labels": [1, -1, 3]}]),),
        rf"`jobs\[0\].evaluation\[0\]` must be of numbers from 0 to {VOCAB - 1}, got -1 to 3",
    ),
    "halves": (
        lambda: (GOOD._replace(data=[GOOD.data[0] | {"input_ids": [1, 2.5, 3]}]),),
        r"`jobs\[0\].data\[0\]` must be of ints, got torch.float32",
    ),
    "drawn": (
        lambda: (GOOD._replace(data=Growing([None])),),
        r"the same whenever it is read, got 3 tokens and 2 labels, before 2",
    ),
}


@pytest.mark.parametrize("case", JOBS)
def test_jobs_that_are_refused(case):
    make, message = JOBS[case]
    with pytest.raises(FdoraError, match=message):
        train(shared(), make(), capacity=40)


def test_a_capacity_that_is_refused():
    with pytest.raises(FdoraError, match="`capacity` must be a positive int, got -1"):
        train(shared(), [GOOD], capacity=-1)


@functools.cache
def shared():
    """Refused jobs leave it as it is."""
    return with_adapter()()
