"""A training of these adapters as the planner sees it: memory and time on a GPU, and how many tokens a microbatch gets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fdora._check import FdoraError, fail
from fdora.jobs.causal.banks import Layer, norms_of, running
from fdora.jobs.causal.data import FN, Course, Read, pack
from fdora.jobs.causal.runs import losses_of
from fdora.jobs.loop import Work
from fdora.jobs.loop.step import leaves_of
from fdora.jobs.plan import Adapter, Card, Memory, Model, Setup, capacity, card, memory, read_model, times
from fdora.jobs.plan.cost import SPARE
from fdora.jobs.plan.model import check_setup
from fdora.jobs.schedule import Spec, schedule, simulate
from fdora.jobs.schedule.records import Lengths, Microbatch
from fdora.jobs.schedule.simulate import tokens
from fdora.predict import GPUS

BF16 = dict.fromkeys(("torch.bfloat16", "torch.float16"), "bf16")  # the planner's word for 16 bits
DEFAULT = 4096  # tokens of a microbatch where nothing is planned
MESSAGE = 256  # tokens whose forward takes as long: 0.4 ms on two H200, where 1000 tokens took 1.7 ms (bench/NOTES.md)
TRIED = 8  # batches of each adapter, by which tokens of a microbatch are compared


Took = Callable[[Sequence[Microbatch]], float]


class Terms(NamedTuple):
    """What the planner wants to know."""

    model: Model
    setup: Setup


def terms_of(
    model: Any, layers: Mapping[str, Layer], banks: Mapping[str, Any], names: Sequence[str], reads: Sequence[Read]
) -> Terms:
    """Of a PEFT model, with or without values.

    Raises:
      FdoraError: the planner knows no such model, weights, layers or attention.
    """
    inner = model.get_base_model()
    attention = inner.config._attn_implementation
    if attention == "eager":
        raise fail(FN, "model", "one whose attention is planned", "attn_implementation='eager'", "Take 'sdpa'.")
    kinds = {str(getattr(layer.W, "kind", layer.W.dtype)) for layer in layers.values()}
    adapters = (Adapter(name, max(layer.ranks[a] for layer in layers.values())) for a, name in enumerate(names))
    pairs = [(n, each.labels[i]) for each in reads for i, n in each.tokens.items()]
    longest = max(n for n, _ in pairs)
    setup = Setup(
        longest,
        tuple(adapters),
        checkpointing=any(getattr(module, "gradient_checkpointing", False) and module.training for module in inner.modules()),
        loss_tokens=max(1, math.ceil(longest * max(labels / n for n, labels in pairs))),
        weights=" and ".join({BF16.get(kind, kind) for kind in sorted(kinds)}),
        adapter_bytes=next(iter(banks.values())).params.A.element_size(),
        microbatches=2,  # gradients of several are added up
        targets=frozenset(path.rpartition(".")[2] for path in layers),
        packed=attention == "sdpa",
        dropout=any(layer.is_twice(banks[path].params) for path, layer in layers.items()),
    )
    return Terms(read_model(inner.config.to_dict()), check_setup(setup))


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


def seconds_of(terms: Terms, works: Sequence[Work], card: Card) -> float:
    """Of these microbatches, as if each were as long as the mean."""
    count = len(works)
    mean = sum(sample.length for work in works for sample in work.samples) // count
    each = times(*terms, mean, card.profile)
    return each.step(count) + (sum(bool(work.due) for work in works) - 1) * each.update


class Choice(NamedTuple):
    """Tokens of a microbatch, and why so many."""

    tokens: int
    why: str


def most(find: Callable[[], Terms], card: Card | None) -> Choice:
    """What the planner says fits; where it cannot say, a default."""
    if card is None:
        return Choice(DEFAULT, "the default without a GPU")
    try:
        terms = find()
    except FdoraError as error:
        return Choice(DEFAULT, f"the default where memory is not planned ({error})")
    budget = card.bytes * (1 - SPARE) - memory_of(terms, 1).peak + memory(*terms, 1).peak
    return Choice(capacity(*terms, max(1, int(budget))), f"by the planner the most on {card.name}")


def timer_of(
    model: Any, layers: Mapping[str, Layer], banks: Mapping[str, Any], course: Course, clock: Callable[[], float]
) -> Took:
    """Seconds of microbatches as if all took as long as the fullest: its least of three times, of which one may compile."""
    params, _ = leaves_of({path: bank.params for path, bank in banks.items()})
    norms, device = norms_of(layers, params), next(iter(layers.values())).W.device

    def seconds(microbatches: Sequence[Microbatch]) -> float:
        samples = max(microbatches, key=lambda each: tokens(each, 0))
        packed = pack(course, Work(samples, (), ()), device)._replace(seed=0)
        ends = [clock()]
        try:
            with running(model, layers) as logits:
                for _ in range(3):
                    losses_of(logits, params, norms, packed).sum().backward()
                    ends.append(clock())
        except torch.OutOfMemoryError:  # at the third time, too
            return math.inf
        return len(microbatches) * min(end - start for start, end in pairwise(ends))

    return seconds


def clock_of(device: torch.device) -> Callable[[], float] | None:
    """The time at which a GPU has done what it was given; none of a CPU."""

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock if device.type == "cuda" else None


def through(stages: int, microbatches: Sequence[Microbatch]) -> float:
    """The time of a pipeline, in tokens of a stage. Small microbatches leave fewer gaps, but each has its message."""
    return simulate(microbatches, stages, forward=lambda each, _: tokens(each, 0) + MESSAGE if each else 0.0).time


def chosen(lengths: Lengths, longest: int, limit: Choice, depth: int = 1, took: Took | None = None) -> Choice:
    """Tokens from three quarters of the limit up to all of it: what leaves the fewest places empty, and of equals the most.

    Never fewer than the longest sample has, nor more than a batch of each adapter: more are never together. In a pipeline, and
    where ``took`` says what microbatches take, from a quarter up: what takes the least.
    """
    took = partial(through, depth) if depth > 1 else took
    together = sum(max(map(sum, batches), default=0) for batches in lengths)
    top, why = min((together, "one batch of each adapter"), limit)
    if top < longest:
        top, why = longest, f"the longest sample; {why}: {top}"
    first, tried, said = [batches[:TRIED] for batches in lengths], dict[int, float](), list[str]()
    for n in sorted({max(longest, top * part // 8) for part in ((2, 4, 6, 7, 8) if took else (6, 7, 8))}, reverse=True):
        found = schedule(first, Spec(n, depth, seconds=0))
        tried[n] = took(found.microbatches) if took else len(found.microbatches) * n - found.tokens
        said.append(f"{n} {'take' if took else 'leave'} {tried[n]:.6g}")
    best = min(tried, key=lambda n: tried[n])
    what = "empty places in" if took is None else "seconds of" if depth == 1 else f"tokens' time on {depth} stages of"
    return Choice(best, f"at most {top}, {why}; {what} {TRIED} batches of each adapter: {', '.join(said)}")
