"""A training of these adapters as the planner sees it: its memory and its time on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import fail
from fdora.jobs.causal.banks import Layer
from fdora.jobs.causal.data import Course, Read
from fdora.jobs.causal.records import FN
from fdora.jobs.plan import Adapter, Card, Memory, Model, Setup, card, memory, read_model, times
from fdora.jobs.plan.setup import check_setup
from fdora.predict import GPUS


class Terms(NamedTuple):
    """What the planner wants to know."""

    model: Model
    setup: Setup


def terms_of(model: Any, layers: Mapping[str, Layer], names: Sequence[str], size: int, reads: Sequence[Read]) -> Terms:
    """Of a PEFT model, with or without values. ``size``: bytes of an element of its adapters.

    Raises:
      FdoraError: the planner knows no such model, weights, layers or attention.
    """
    inner = model.get_base_model()
    attention = inner.config._attn_implementation
    if attention == "eager":
        raise fail(FN, "model", "one whose attention is planned", "attn_implementation='eager'", "Take 'sdpa'.")
    weights = {of_weight(layer.W) for layer in layers.values()}
    adapters = (Adapter(name, max(layer.ranks[a] for layer in layers.values())) for a, name in enumerate(names))
    pairs = [(n, each.labels[i]) for each in reads for i, n in each.tokens.items()]
    longest = max(n for n, _ in pairs)
    setup = Setup(
        longest,
        tuple(adapters),
        checkpointing=any(getattr(module, "gradient_checkpointing", False) and module.training for module in inner.modules()),
        loss_tokens=max(1, math.ceil(longest * max(labels / n for n, labels in pairs))),
        weights=" and ".join(sorted(weights)),
        adapter_bytes=size,
        microbatches=2,  # gradients of several are added up
        targets=frozenset(path.rpartition(".")[2] for path in layers),
        packed=attention == "sdpa",
        dropout=any(layer.dropout is not None for layer in layers.values()),
    )
    return Terms(read_model(inner.config.to_dict()), check_setup(setup))


def of_weight(W: Any) -> str:
    """Its format, by the planner's name where that has one."""
    if not isinstance(W, Tensor):
        return str(W.kind)
    return "bf16" if W.dtype.itemsize == 2 else str(W.dtype)


def card_of(device: torch.device) -> Card | None:
    """None on a CPU. The rates are its own where they are measured."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    own = next((key for key, rates in GPUS.items() if rates.driver == facts.name), None)
    like = card(own or "h200")
    return like._replace(name=facts.name, bytes=facts.total_memory, measured=like.measured and own is not None)


def memory_of(terms: Terms, tokens: int) -> Memory:
    """With ``tokens`` in a microbatch. Adapters are in the model and in the state; gradients are made beside those so far."""
    held = memory(*terms, tokens)
    return held._replace(adapters=2 * held.adapters, gradients=2 * held.gradients)


def seconds_of(terms: Terms, course: Course, card: Card) -> float:
    """Of all microbatches, as if each were as long as the mean."""
    count = len(course.works)
    mean = sum(sample.length for work in course.works for sample in work.samples) // count
    time = times(*terms, mean, card.profile)
    updates = sum(bool(work.due) for work in course.works) * time.update
    return max(count * (time.forward + time.backward) + updates, count * time.host)
