"""The demo's encoder as functions of banks: many adapters, tokens packed without padding, in as many stages as are wanted.

Weights, embeddings and layer norms are those of a frozen BertModel; its linear layers become ``dora_linear_multi``. Samples lie
one after the other, sorted by adapter; only attention sees them as rows of a padded batch.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import BertConfig, BertModel

from fdora.functional import dora_linear_multi, dora_norm
from fdora.jobs.loop import Model, Stage, Work
from fdora.jobs.schedule import segment_ends

HEAD = "head"


class Text(NamedTuple):
    """One sample."""

    ids: list[int]
    label: int


class Packed(NamedTuple):
    """A microbatch."""

    ids: Tensor  # (M,)
    places: Tensor  # (M,): of each token in its sample
    ends: Tensor  # (G,): of each adapter's tokens
    rows: Tensor  # (samples, T): where each token of each sample lies; M for padding
    adapters: Tensor  # (samples,)
    labels: Tensor  # (samples,)


class Adapters(NamedTuple):
    """What a bank's layers are told of them."""

    ranks: tuple[int, ...]
    s: tuple[float, ...]


def pack(work: Work, texts: list[list[list[Text]]]) -> Packed:
    """``texts[adapter][batch][number]``."""
    chosen = [texts[a][j][i] for a, j, i, _ in work.samples]
    lengths = [len(text.ids) for text in chosen]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1, None]
    places = torch.arange(max(lengths))
    rows = torch.where(places < torch.tensor(lengths)[:, None], starts + places, sum(lengths))
    return Packed(
        torch.tensor([token for text in chosen for token in text.ids]),
        torch.cat([torch.arange(n) for n in lengths]),
        torch.tensor(segment_ends(work.samples, len(texts)), dtype=torch.int32),
        rows,
        torch.tensor([sample.adapter for sample in work.samples]),
        torch.tensor([text.label for text in chosen]),
    )


def random_encoder() -> BertModel:
    """A small one that nobody trained, for a machine without the demo's model."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = BertModel(BertConfig(**sizes, vocab_size=512), add_pooling_layer=False)
    torch.set_rng_state(generator_state)
    return model.eval().requires_grad_(False)


def hashed(text: str) -> list[int]:
    """Tokens for it: words, by a hash."""
    return [1 + zlib.crc32(word.encode()) % 511 for word in text.split()]


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}


def stages_of(model: BertModel, adapters: Adapters, count: int) -> list[Stage]:
    """The encoder and the heads in ``count`` stages of as many layers each as go round."""
    layers = list(model.encoder.layer)
    cuts = [len(layers) * n // count for n in range(count + 1)]
    linear = linear_layers(model)

    def stage(number: int) -> Stage:
        inside = range(cuts[number], cuts[number + 1])
        names = [name for n in inside for name in linear if name.startswith(f"encoder.layer.{n}.")]

        def keep(params: dict[str, Any]) -> dict[str, Tensor]:
            return {n: dora_norm(linear[n].weight, *params[n][:2], s=adapters.s) for n in names}

        def forward(params: dict[str, Any], kept: dict[str, Tensor], x: Tensor | None, data: Packed) -> Tensor:
            def project(name: str, x: Tensor) -> Tensor:
                W, bias = linear[name].weight, linear[name].bias
                given = {"s": adapters.s, "offsets": data.ends, "norm": kept[name], "ranks": adapters.ranks}
                return dora_linear_multi(x, W, *params[name], bias=bias, **given)

            if x is None:
                x = model.embeddings(input_ids=data.ids[None], position_ids=data.places[None])[0]
            for n in inside:
                x = block(layers[n], f"encoder.layer.{n}.", project, x, data, model.config.num_attention_heads)
            return x if number + 1 < count else losses(params[HEAD], x, data)

        return Stage(forward, (*names, *([HEAD] if number + 1 == count else [])), keep)

    return [stage(number) for number in range(count)]


def block(layer: Any, name: str, project: Any, x: Tensor, data: Packed, heads: int) -> Tensor:
    """One layer of BERT on packed tokens."""
    inside = data.rows < len(x)

    def rows(part: str) -> Tensor:
        y = project(f"{name}attention.self.{part}", x)
        y = torch.cat([y, y.new_zeros(1, y.shape[1])])[data.rows]  # (samples, T, hidden)
        return y.unflatten(2, (heads, -1)).transpose(1, 2)

    mixed = scaled_dot_product_attention(*map(rows, ("query", "key", "value")), attn_mask=inside[:, None, None])
    mixed = mixed.transpose(1, 2).flatten(2)[inside]
    x = layer.attention.output.LayerNorm(project(f"{name}attention.output.dense", mixed) + x)
    wide = layer.intermediate.intermediate_act_fn(project(f"{name}intermediate.dense", x))
    return layer.output.LayerNorm(project(f"{name}output.dense", wide) + x)


def losses(head: dict[str, Tensor], x: Tensor, data: Packed) -> Tensor:
    """Cross-entropy of each sample, by its adapter's head on the mean of its tokens."""
    inside = (data.rows < len(x)).to(x.dtype)
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])[data.rows]
    mean = padded.sum(1) / inside.sum(1, keepdim=True)
    logits = torch.einsum("nk,nck->nc", mean, head["weight"][data.adapters]) + head["bias"][data.adapters]
    return cross_entropy(logits, data.labels, reduction="none")


def whole_of(model: BertModel, adapters: Adapters) -> Model:
    """All of it, for one process."""
    (only,) = stages_of(model, adapters, 1)
    return Model(lambda params, kept, data: only.forward(params, kept, None, data), only.keep)
