"""Decoder layers in the shape of Llama-3.1-8B on packed samples, random and frozen, whose products are whoever's.

``project(name, x)`` is a linear layer: a module of PEFT's, or one call of ``dora_linear_multi``. All else is the same for all.
No embedding and no head: what goes in is random, the loss of a sample is the mean of its squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.decoder import rotate
from fdora.functional import dora_linear_multi, dora_norm
from fdora.jobs.loop import Stage, Work
from fdora.jobs.schedule import segment_ends

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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
    lengths: tuple[int, ...]  # of the samples
    counts: Tensor  # the same on the device
    cos: Tensor  # (M, head)
    sin: Tensor
    owner: Tensor  # (M,): sample of each token
    ends: Tensor  # (G,)


def data_of(work: Work, sizes: Sizes, adapters: int, dtype: torch.dtype, device: str) -> Data:
    lengths = tuple(sample.length for sample in work.samples)
    draw = torch.Generator(device).manual_seed(hash(work.samples) % 2**31)
    x = torch.randn(sum(lengths), sizes.hidden, device=device, dtype=dtype, generator=draw)
    frequencies = 5e5 ** (-torch.arange(0, sizes.head, 2, device=device) / sizes.head)
    turns = torch.outer(torch.cat([torch.arange(n, device=device) for n in lengths]), frequencies).repeat(1, 2)
    owner = torch.repeat_interleave(torch.tensor(lengths)).to(device)
    ends = torch.tensor(segment_ends(work.samples, adapters), dtype=torch.int32).to(device)
    counts = torch.tensor(lengths).to(device)
    return Data(x, lengths, counts, turns.cos().to(dtype), turns.sin().to(dtype), owner, ends)


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


def attention(project: Project, x: Tensor, data: Data, sizes: Sizes) -> Tensor:
    def heads(name: str) -> Tensor:
        return project(name, x).unflatten(-1, (-1, sizes.head)).transpose(0, 1)  # (heads, M, head)

    q, k = (rotate(heads(name), data.cos, data.sin) for name in ("q_proj", "k_proj"))
    parts = zip(*(t.split(data.lengths, 1) for t in (q, k, heads("v_proj"))), strict=True)
    out = [F.scaled_dot_product_attention(*(t[None] for t in part), is_causal=True, enable_gqa=True)[0] for part in parts]
    return project("o_proj", torch.cat(out, 1).transpose(0, 1).flatten(1))


def block(project: Project, x: Tensor, data: Data, sizes: Sizes) -> Tensor:
    x = x + attention(project, F.rms_norm(x, x.shape[-1:]), data, sizes)
    h = F.rms_norm(x, x.shape[-1:])
    return x + project("down_proj", F.silu(project("gate_proj", h)) * project("up_proj", h))


def losses_of(x: Tensor, data: Data) -> Tensor:
    of_token = x.float().square().mean(1)
    sums = of_token.new_zeros(len(data.lengths)).index_add(0, data.owner, of_token)
    return sums / data.counts


def by_modules(model: nn.Module, data: Data) -> Tensor:
    """The losses through the modules that stand in the model, PEFT's or its own."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    x = data.x
    for layer in base.layers:
        x = block(lambda name, x, layer=layer: layer[name](x), x, data, base.sizes)
    return losses_of(x, data)


def stage_of(model: Decoder, inside: range, s: tuple[float, ...], ranks: tuple[int, ...], first: bool, last: bool) -> Stage:
    """Layers of a decoder with banks, the parameters named ``layers.0.q_proj`` and so on."""
    names = tuple(f"layers.{n}.{name}" for n in inside for name in LINEARS)
    scale = torch.tensor(s, device=next(model.parameters()).device)
    W = {name: model.get_submodule(name).weight for name in names}

    def keep(params):
        return {name: dora_norm(W[name], *params[name][:2], s=scale) for name in names}

    def forward(params, kept, x, data):
        x = data.x if first else x
        for n in inside:

            def project(part, x, n=n):
                name = f"layers.{n}.{part}"
                given = {"s": scale, "offsets": data.ends, "norm": kept[name], "ranks": ranks}
                return dora_linear_multi(x, W[name], *params[name], **given)

            x = block(project, x, data, model.sizes)
        return losses_of(x, data) if last else x

    return Stage(forward, names, keep)
