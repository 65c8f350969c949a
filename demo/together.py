"""Four jobs: each alone, all together in one process, and as a pipeline of two. Same start, same batches: same losses."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Generator, nn
from torch.nn.functional import cross_entropy
from transformers import BatchEncoding, BertModel

from demo import stop
from demo.corpora import PACKAGES, load_corpora
from demo.encoder import HEAD, Adapters, Text, hashed, linear_layers, pack, random_encoder, stages_of, whole_of
from fdora.functional import DoraParams, dora_init, dora_linear, dora_stack
from fdora.jobs.loop import Job, Wire, Work, connect, init_state, run_pipeline, select_state, train_step, works_of
from fdora.jobs.schedule import Schedule, Spec, schedule

Curves = list[list[float]]
"""[adapter][batch]: mean loss."""


class Recipe(NamedTuple):
    """What one adapter is trained with."""

    r: int
    lr: float
    batch_size: int
    clip: float | None


RECIPES = {
    "docstrings": Recipe(8, 2e-3, 16, None),
    "comments": Recipe(4, 1e-3, 12, 1.0),
    "signatures": Recipe(16, 5e-4, 24, None),
    "messages": Recipe(2, 3e-3, 8, 0.5),
}
S = 2.0
EPS = 1e-6  # the usual 1e-8 would blow rounding differences in tiny gradients up to whole steps


class Setting(NamedTuple):
    """What is asked for."""

    steps: int
    random: bool
    seed: int
    max_tokens: int = 64
    capacity: int = 256  # tokens of a microbatch


class World(NamedTuple):
    """All that is trained, and on what."""

    texts: list[list[list[Text]]]  # [adapter][batch][sample]
    starts: list[dict[str, DoraParams]]
    head: nn.Linear
    jobs: tuple[Job, ...]
    adapters: Adapters

    def params(self) -> dict[str, Any]:
        banks = {name: dora_stack([start[name] for start in self.starts]) for name in self.starts[0]}
        parts = {part: torch.stack([t.detach()] * len(self.jobs)) for part, t in self.head.named_parameters()}
        return {**banks, HEAD: parts}

    def lengths(self) -> list[list[list[int]]]:
        return [[[len(text.ids) for text in batch] for batch in batches] for batches in self.texts]


def encoder_of(setting: Setting) -> BertModel:
    if setting.random:
        return random_encoder()
    from demo.model import load_encoder  # wants the package that carries it

    return load_encoder(torch.device("cpu"))


def world_of(setting: Setting) -> World:
    counts = {kind: recipe.batch_size * setting.steps for kind, recipe in RECIPES.items()}
    if setting.random:
        tokens = hashed
    else:
        from demo.model import load_tokenizer

        tokenizer = load_tokenizer()
        tokens = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    texts = []
    for kind, samples in load_corpora(counts).items():
        all_ = [Text(tokens(sample.text)[: setting.max_tokens], sample.label) for sample in stop.steps(samples)]
        size = RECIPES[kind].batch_size
        texts.append([all_[n : n + size] for n in range(0, len(all_), size)])
    model = encoder_of(setting)
    generator = Generator().manual_seed(setting.seed)
    weights = {name: layer.weight for name, layer in linear_layers(model).items()}
    starts = [{n: dora_init(W, recipe.r, generator=generator) for n, W in weights.items()} for recipe in RECIPES.values()]
    torch.manual_seed(setting.seed)
    head = nn.Linear(model.config.hidden_size, len(PACKAGES))
    jobs = tuple(Job(kind, recipe.lr, clip=recipe.clip, eps=EPS, weight_decay=0.01) for kind, recipe in RECIPES.items())
    adapters = Adapters(tuple(recipe.r for recipe in RECIPES.values()), (S,) * len(RECIPES))
    return World(texts, starts, head, jobs, adapters)


def alone(setting: Setting, world: World, a: int) -> tuple[list[float], float]:
    """One adapter as everybody trains it: transformers' model on padded batches, torch's optimizer. And its seconds."""
    model, job = encoder_of(setting), world.jobs[a]
    params = {name: DoraParams(*(t.clone().requires_grad_() for t in p)) for name, p in world.starts[a].items()}
    for name, p in params.items():
        layer = model.get_submodule(name)
        layer.forward = partial(dora_linear, W=layer.weight, A=p.A, B=p.B, m=p.m, s=S, bias=layer.bias)
    head = nn.Linear(world.head.in_features, world.head.out_features)
    head.load_state_dict(world.head.state_dict())
    leaves = [*(t for p in params.values() for t in p), *head.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=job.rate(0), eps=job.eps, weight_decay=job.weight_decay)
    losses, begin = [], perf_counter()
    for batch in stop.steps(world.texts[a]):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(text.ids) for text in batch], batch_first=True)
        inside = torch.arange(ids.shape[1]) < torch.tensor([len(text.ids) for text in batch])[:, None]
        states = model(**BatchEncoding({"input_ids": ids, "attention_mask": inside.long()})).last_hidden_state
        mean = (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        loss = cross_entropy(head(mean), torch.tensor([text.label for text in batch]))
        loss.backward()
        if job.clip is not None:
            nn.utils.clip_grad_norm_(leaves, job.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, perf_counter() - begin


def planned(setting: Setting, world: World) -> Schedule:
    return schedule(world.lengths(), Spec(setting.capacity, depth=2, seconds=5))


def together(setting: Setting, world: World, plan: Schedule) -> tuple[Curves, float]:
    """All adapters in one process."""
    model, works = whole_of(encoder_of(setting), world.adapters), works_of(plan)
    state, found, begin = init_state(world.params(), world.jobs, model.keep), {}, perf_counter()
    for n, work in enumerate(stop.steps(works)):
        data = pack(work, world.texts) if work.samples else None
        state, found[n] = train_step(state, work, data, model=model, jobs=world.jobs, donate=True)
    seconds = perf_counter() - begin
    return curves(works, found, world), seconds


def pipelined(setting: Setting, world: World, plan: Schedule) -> tuple[Curves, float]:
    """All adapters in a pipeline of two processes, by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((setting, world, plan), Path(folder) / "given.pt")
        context = multiprocessing.get_context("spawn")
        started = [context.Process(target=stage_process, args=(rank, folder)) for rank in range(2)]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join()
        finally:
            for process in started:
                if process.is_alive():
                    process.terminate()
        stop.check()
        failed = [process.exitcode for process in started if process.exitcode]
        if failed:
            raise RuntimeError(f"a stage of the pipeline ended with status {failed[0]}")
        result = json.loads((Path(folder) / "curves.json").read_text())
    return result["curves"], result["seconds"]


def stage_process(rank: int, folder: str) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    setting, world, plan = torch.load(Path(folder) / "given.pt", weights_only=False)
    works, links = works_of(plan), connect()
    model = encoder_of(setting)
    stage = stages_of(model, world.adapters, 2)[rank]
    state = select_state(init_state(world.params(), world.jobs), stage.names)
    wire = Wire(lambda work: (sum(sample.length for sample in work.samples), model.config.hidden_size))
    dist.barrier()
    begin = perf_counter()
    ran = run_pipeline(
        state, works, lambda n: pack(works[n], world.texts), stages={rank: stage}, wire=wire, jobs=world.jobs, links=links
    )
    dist.barrier()
    seconds = perf_counter() - begin
    if rank == 1:
        found = {"curves": curves(works, ran.losses, world), "seconds": seconds}
        (Path(folder) / "curves.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # Python aborts at its end, before 3.14, if one of gloo's threads then lets go of a tensor


def curves(works: tuple[Work, ...], losses: dict[int, torch.Tensor], world: World) -> Curves:
    sums = [[0.0] * len(batches) for batches in world.texts]
    for n, each in losses.items():
        for sample, loss in zip(works[n].samples, each.tolist(), strict=True):
            sums[sample.adapter][sample.batch] += loss
    return [[sums[a][j] / len(batch) for j, batch in enumerate(batches)] for a, batches in enumerate(world.texts)]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
