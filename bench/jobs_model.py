"""Decoder layers in the shape of Llama-3.1-8B on packed samples, random and frozen, whose products are whoever's.

``project(name, x)`` is a linear layer: a module of PEFT's, or one call of ``dora_linear_multi``. All else is the same for all,
but for ``f(gate) up``: fdora has a kernel for it, PEFT's model torch's two. No embedding and no head: what goes in
is random, the loss of a sample is the mean of its squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.decoder import LINEARS
from bench.schedule import KINDS, alone, drawn
from bench.ways import S, away
from fdora.functional import DoraParams, dora_linear, dora_linear_multi, dora_stack
from fdora.functional.act import gated_act
from fdora.functional.multi import multi_together
from fdora.jobs.causal.banks import Layer, arguments, norms_of
from fdora.jobs.loop import Job, Stage, Work, init_state, works_of
from fdora.jobs.schedule import Sample, Schedule, Spec, pack, schedule, segment_ends
from fdora.jobs.schedule.records import Microbatch
from fdora.jobs.schedule.whole import rounds_of

CLIP, LR = 1.0, 1e-4
PADDED = 4  # samples of a padded microbatch
Project = Callable[[str, Tensor], Tensor]


class Sizes(NamedTuple):
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    intermediate: int = 14336

    def shape(self, name: str) -> tuple[int, int]:
        """(in, out)."""
        wide, narrow = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, wide),
            "k_proj": (self.hidden, narrow),
            "v_proj": (self.hidden, narrow),
            "o_proj": (wide, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[name]


TINY = Sizes(32, 4, 2, 8, 48)


class Data(NamedTuple):
    """A microbatch."""

    x: Tensor  # (M, hidden)
    lengths: tuple[int, ...]  # of the samples, with what they are padded by
    counts: Tensor  # without it
    cos: Tensor  # (M, head)
    sin: Tensor
    owner: Tensor  # (M,): sample of each token; behind the last of what is padding
    ends: Tensor  # (G,)
    tokens: tuple[int, ...]  # of each adapter
    seed: int | None = None  # of dropout's masks in banks; None: nothing is dropped


def data_of(work: Work, sizes: Sizes, adapters: int, dtype: torch.dtype, device: str, padded: bool = False) -> Data:
    """``padded``: each sample to the longest. Its padding comes last, so that it needs no mask: no token sees it."""
    true = [sample.length for sample in work.samples]
    lengths = (max(true),) * len(true) if padded else tuple(true)
    draw = torch.Generator(device).manual_seed(hash(work.samples) % 2**31)
    x = torch.randn(sum(lengths), sizes.hidden, device=device, dtype=dtype, generator=draw)
    frequencies = 5e5 ** (-torch.arange(0, sizes.head, 2, device=device) / sizes.head)
    turns = torch.outer(torch.cat([torch.arange(n, device=device) for n in lengths]), frequencies).repeat(1, 2)
    own = ([i] * t + [len(true)] * (n - t) for i, (n, t) in enumerate(zip(lengths, true, strict=True)))
    owner = torch.tensor([*chain.from_iterable(own)])
    ends = segment_ends(work.samples, adapters)
    tokens = tuple(b - a for a, b in pairwise((0, *ends)))
    counts, places = torch.tensor(true).to(device), torch.tensor(ends, dtype=torch.int32).to(device)
    return Data(x, lengths, counts, turns.cos().to(dtype), turns.sin().to(dtype), owner.to(device), places, tokens)


class Decoder(nn.Module):
    """The weights, by the name of their layer."""

    def __init__(self, layers: int, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(nn.ModuleDict({name: nn.Linear(*sizes.shape(name), bias=False) for name in LINEARS}))


def decoder(layers: int, sizes: Sizes, dtype: torch.dtype, device: str) -> Decoder:
    with torch.device("meta"):
        model = Decoder(layers, sizes).to(dtype)
    model.to_empty(device=device).requires_grad_(False)
    draw = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        p.normal_(std=p.shape[1] ** -0.5, generator=draw)
    return model


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return t * cos + torch.cat((-b, a), -1) * sin


def attention(project: Project, projections: Sequence[Tensor], data: Data, sizes: Sizes) -> Tensor:
    q, k, v = (y.unflatten(-1, (-1, sizes.head)).transpose(0, 1) for y in projections)  # (heads, M, head)
    q, k = (rotate(t, data.cos, data.sin) for t in (q, k))
    parts = zip(*(t.split(data.lengths, 1) for t in (q, k, v)), strict=True)
    out = [F.scaled_dot_product_attention(*(t[None] for t in part), is_causal=True, enable_gqa=True)[0] for part in parts]
    return project("o_proj", torch.cat(out, 1).transpose(0, 1).flatten(1))


def one_by_one(project: Project, names: Sequence[str], x: Tensor, act: str | None) -> Sequence[Tensor]:
    ys = [project(name, x) for name in names]
    return ys if act is None else (F.silu(ys[0]) * ys[1],)


def block(project: Project, x: Tensor, data: Data, sizes: Sizes, together: Any = one_by_one) -> Tensor:
    """``together``: of layers on one x the outputs, or of two f(gate) up."""
    q, k, v, _, gate, up, _ = LINEARS
    x = x + attention(project, together(project, (q, k, v), F.rms_norm(x, x.shape[-1:]), None), data, sizes)
    return x + project("down_proj", *together(project, (gate, up), F.rms_norm(x, x.shape[-1:]), "silu"))


def losses_of(x: Tensor, data: Data) -> Tensor:
    of_token = x.float().square().mean(1)
    sums = of_token.new_zeros(len(data.lengths) + 1).index_add(0, data.owner, of_token)
    return sums[:-1] / data.counts


def by_modules(model: nn.Module, data: Data) -> Tensor:
    """The losses through the modules that stand in the model, PEFT's or its own."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    x = data.x
    for layer in base.layers:
        x = block(lambda name, x: layer[name](x), x, data, base.sizes)
    return losses_of(x, data)


def grouped(layer: Layer, params: DoraParams, norm: Tensor | None, data: Data, x: Tensor, seed: int | None) -> Tensor:
    return dora_linear_multi(x, offsets=data.ends, **arguments(layer, params, norm, seed))


def separate(layer: Layer, params: DoraParams, norm: Tensor | None, data: Data, x: Tensor, seed: int | None) -> Tensor:
    """The same by a call of the single layer for the tokens of each adapter."""
    found = []
    for a, part in enumerate(x.split(data.tokens)):
        if len(part):
            own = (None if t is None else t[a] for t in (*params, norm))
            A, B, m, c = own
            how = {} if seed is None else {"dropout_p": layer.dropout, "dropout_mode": layer.dropout_mode, "seed": seed + a}
            found.append(dora_linear(part, layer.W, A, B, m, s=S, norm=c, **how))
    return torch.cat(found)


def stage_of(model: Decoder, inside: range, layers: dict[str, Layer], first: bool, last: bool, call=grouped) -> Stage:
    """Layers of a decoder with banks, the parameters named ``layers.0.q_proj`` and so on."""
    names = tuple(f"layers.{n}.{name}" for n in inside for name in LINEARS)

    def forward(params, kept, x, data):
        x = data.x if first else x
        for n in inside:

            def given(part):
                name = f"layers.{n}.{part}"
                seed = None if data.seed is None else data.seed + names.index(name)
                return layers[name], params[name], kept[name], seed

            def project(part, x):
                *own, seed = given(part)
                return call(*own, data, x, seed)

            def together(project, parts, h, act):
                if call is grouped:
                    return multi_together(h, [arguments(*given(part)) for part in parts], data.ends, act)
                ys = [project(part, h) for part in parts]
                return ys if act is None else (gated_act(*ys, act),)

            x = block(project, x, data, model.sizes, together)
        return losses_of(x, data) if last else x

    return Stage(forward, names, partial(norms_of, {name: layers[name] for name in names}))


class Jobs:
    """What every way is given."""

    def __init__(self, options):
        self.device = options.device if options.world == 1 or options.device == "cpu" else f"cuda:{dist.get_rank()}"
        self.dtype = torch.float32 if options.tiny else torch.bfloat16
        self.sizes = TINY if options.tiny else Sizes()
        self.capacity = capacity_of(options)
        self.options, self.r, self.layers, self.count = options, options.r, options.layers, len(KINDS)
        self.dropout, self.dropout_mode = options.dropout, options.dropout_mode
        self.jobs = [Job(kind, LR, clip=CLIP) for kind in KINDS]
        self.draw(tuple(KINDS))
        self.model = decoder(options.layers, self.sizes, self.dtype, self.device)
        draw = torch.Generator(self.device).manual_seed(1)
        self.starts = {}
        for n in range(options.layers):
            for name in LINEARS:
                W = self.model.layers[n][name].weight
                own = [away(W, self.r, self.dtype, draw)[:3] for _ in range(self.count)]
                self.starts[f"layers.{n}.{name}"] = [DoraParams(*each) for each in own]
        scale = torch.tensor((S,) * self.count, device=self.device)
        how = {"dropout": self.dropout, "dropout_mode": self.dropout_mode}
        self.banks = {
            name: Layer(self.model.get_submodule(name).weight, scale, (self.r,) * self.count, **how) for name in self.starts
        }

    def draw(self, kinds: Sequence[str]) -> None:
        """Jobs on samples of these kinds."""
        self.lengths = lengths_of(self.options, kinds)
        self.plan = plan_of(self.lengths, self.options)
        self.works = works_of(self.plan)
        alone = [plan_of([each], self.options).microbatches for each in self.lengths]
        self.alone = [works_of(renamed(each, a)) for a, each in enumerate(alone)]
        self.padded = [works_of(renamed(each, a)) for a, each in enumerate(map(padded_of, self.lengths))]
        self.tokens = sum(n for batches in self.lengths for batch in batches for n in batch)
        self.cache = {}

    def data(self, work, padded=False, drop=False):
        """Made once: the input is no part of what is timed."""
        key = work.samples, padded
        if key not in self.cache:
            self.cache[key] = data_of(work, self.sizes, self.count, self.dtype, self.device, padded)
        return self.cache[key]._replace(seed=hash(work.samples) % 2**31 if drop and self.dropout else None)

    def stage(self, inside, first=True, last=True, call=grouped):
        return stage_of(self.model, inside, self.banks, first, last, call)

    def state(self, stage, dora=True):
        starts = {name: [p if dora else p._replace(m=None) for p in self.starts[name]] for name in stage.names}
        return init_state({name: dora_stack(each) for name, each in starts.items()}, self.jobs, stage.keep)


def capacity_of(options) -> int:
    return 64 if options.tiny else options.capacity


def lengths_of(options, kinds: Sequence[str] = tuple(KINDS)) -> list[list[list[int]]]:
    """Of each job, batch and sample."""
    found = drawn(list(kinds), options.batches, options.samples, options.capacity, 0)
    return [[[max(1, n // 96) if options.tiny else n for n in b] for b in batches] for batches in found]


def plan_of(lengths: list[list[list[int]]], options, seconds: float = 0.0) -> Schedule:
    return schedule(lengths, Spec(capacity_of(options), depth=options.world, seconds=seconds))


def unmerged_of(lengths: list[list[list[int]]], options) -> list[Microbatch]:
    """The same groups and packings, whose last microbatches stay as they are."""
    spec, plan = Spec(capacity_of(options), depth=options.world, seconds=0), plan_of(lengths, options)
    rounds = rounds_of(plan.groups, lengths)
    return [each for _, samples in rounds for each in pack(samples, spec).microbatches]


def unpacked_of(lengths: list[list[list[int]]], options) -> list[Microbatch]:
    """A microbatch takes samples as they come, those of a batch of one adapter after the other, until one does not fit."""
    found = []
    for samples in alone(lengths):
        row = [[]]
        for sample in samples:
            if sum(each.length for each in row[-1]) + sample.length > capacity_of(options):
                row.append([])
            row[-1].append(sample)
        found += map(tuple, row)
    return found


def padded_of(batches: list[list[int]]) -> list[Microbatch]:
    """As a Trainer has them: ``PADDED`` samples at a time, as they come."""
    samples = [[Sample(0, j, i, n) for i, n in enumerate(batch)] for j, batch in enumerate(batches)]
    return [tuple(batch[i : i + PADDED]) for batch in samples for i in range(0, len(batch), PADDED)]


def renamed(microbatches, adapter):
    return [tuple(Sample(adapter, *sample[1:]) for sample in each) for each in microbatches]
