"""Which way to spread a training over GPUs: what each holds, how long a step takes, and the fastest that fits.

replicas   each GPU has everything and microbatches of its own; gradients of adapters are summed once for a step
fsdp2      weights in shards; a block is gathered while the one before it computes, forward and backward, and takes from it
           what it needs of the memory's rate: compute + bytes of all blocks (n - 1) / n / link (on two H200 0.89 to 0.99 of
           what was measured; the greater of the two was 0.78 to 0.88). Two blocks, embedding and head are whole at a time
pipeline   a stage of layers on each GPU, 1F1B over all microbatches (fdora.jobs.schedule.simulate); stage s keeps
           min(n - s, microbatches) microbatches. The last stage has as many layers less as its head takes time
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from fdora._check import check_positive, fail
from fdora.jobs.plan.cost import SPARE, Card, Memory, capacity, card, memory, times
from fdora.jobs.plan.model import E, Model, Part, Setup, check_setup
from fdora.jobs.schedule import Sample, simulate

GATHERED = 2  # blocks


class Layout(NamedTuple):
    """One way to place a training on GPUs. ``seconds``: of an optimizer step; a pipeline has as many microbatches as all
    GPUs of the others together."""

    kind: str
    gpus: int
    fuse: bool
    checkpointing: bool
    tokens: int
    memory: Memory  # of the GPU that holds most
    capacity: int  # tokens of a microbatch, at most
    fits: bool
    seconds: float | None  # None: a link is not measured
    tokens_per_second: float | None
    bubble: float
    stages: tuple[int, ...]  # layers of each


class Plan(NamedTuple):
    """What `plan` found: ``layouts``, those that fit first and the fastest on top; ``best`` is that one, None if none fits."""

    model: Model
    setup: Setup
    card: Card
    gpus: int
    tokens: int
    layouts: tuple[Layout, ...]

    @property
    def budget(self) -> int:
        return int(self.card.bytes * (1 - SPARE))

    @property
    def samples(self) -> int:
        return self.tokens * self.setup.microbatches

    @property
    def best(self) -> Layout | None:
        return self.layouts[0] if self.layouts and self.layouts[0].fits else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Bytes and seconds."""
        found = {"gpu" if name == "card" else name: _plain(value) for name, value in self._asdict().items()}
        return found | {"best": None if self.best is None else 0}


def ways(request: Plan) -> list[Layout]:
    """Every layout, with and without ``fuse`` and checkpointing; those that fit first, the fastest first."""
    found = []
    model, setup, _, gpus, tokens, _ = request
    kinds = [replicas] if gpus == 1 else [replicas, fsdp2] if gpus > model.layers else [replicas, fsdp2, pipeline]
    for fuse in (False,) if len(setup.adapters) > 1 else (False, True):
        for checkpointing in (False, True):
            one = request._replace(setup=setup._replace(fuse=fuse, checkpointing=checkpointing))
            for of in kinds:
                kind, held, most, seconds, trained, bubble, stages = of(one)
                rate = None if seconds is None else trained / seconds
                fits = held.peak <= request.budget
                found.append(Layout(kind, gpus, fuse, checkpointing, tokens, held, most, fits, seconds, rate, bubble, stages))
    return sorted(found, key=lambda way: (not way.fits, -(way.tokens_per_second or 0), way.checkpointing, way.memory.peak))


Way = tuple[Any, ...]
"""Its kind, memory, capacity, seconds, the tokens of a step on all GPUs, bubble and stages."""


def replicas(request: Plan) -> Way:
    model, setup, card, gpus, tokens, _ = request
    held = memory(model, setup, tokens)
    seconds = times(model, setup, tokens, card.profile).step(setup.microbatches)
    kind, most = "replicas" if gpus > 1 else "one", capacity(model, setup, request.budget)
    return kind, held, most, seconds, gpus * request.samples, 0.0, ()


def fsdp2(request: Plan) -> Way:
    """Parameters, gradients and states of the optimizer in n shards; frozen blocks are gathered, adapters with them."""
    model, setup, card, gpus, tokens, _ = request
    whole = memory(model, setup, tokens)
    block = (whole.linears + whole.adapters) // model.layers
    cut = {name: getattr(whole, name) // gpus for name in ("linears", "embeddings", "adapters", "optimizer", "gradients")}
    held = whole._replace(**cut, temporary=whole.temporary + min(GATHERED, model.layers) * block + whole.embeddings)
    most = capacity(model, setup, request.budget + whole.peak - held.peak)
    seconds = None
    if card.profile.gather:
        time = times(model, setup, tokens, card.profile)
        moved = 2 * (whole.linears + whole.adapters) * (gpus - 1) / gpus / card.profile.gather
        seconds = setup.microbatches * max(time.forward + time.backward + moved, time.host) + time.update
    return "fsdp2", held, most, seconds, gpus * request.samples, 0.0, ()


def stages_of(layers: int, gpus: int, head: float) -> tuple[int, ...]:
    """Layers of each stage; the head counts as so many layers of the last."""
    each = (layers + head) / gpus
    last = max(1, min(layers - gpus + 1, round(each - head)))
    base, more = divmod(layers - last, gpus - 1)
    return (*(base + (s < more) for s in range(gpus - 1)), last)


def pipeline(request: Plan) -> Way:
    """One set of microbatches goes through all stages: as many as all replicas would have."""
    model, setup, card, gpus, tokens, _ = request
    layers = times(model, setup, tokens, card.profile, Part(model.layers, False, False))
    with_head = times(model, setup, tokens, card.profile, Part(model.layers, False, True))
    all_ = layers.forward + layers.backward
    stages = stages_of(model.layers, gpus, (with_head.forward + with_head.backward - all_) * model.layers / all_)
    count = gpus * setup.microbatches
    starts = accumulate(stages, initial=0)
    parts = [Part(n, s == 0, s == gpus - 1, start) for s, (n, start) in enumerate(zip(stages, starts, strict=False))]
    flight = [min(gpus - s, count) for s in range(gpus)]
    several = setup._replace(microbatches=count)
    held = [memory(model, several, tokens, part, n) for part, n in zip(parts, flight, strict=True)]
    most = min(capacity(model, several, request.budget, part, n) for part, n in zip(parts, flight, strict=True))
    seconds, bubble = None, 0.0
    if card.profile.send:
        each = [times(model, several, tokens, card.profile, part) for part in parts]
        microbatches = tuple((Sample(0, 0, i, tokens),) for i in range(count))
        line = simulate(
            microbatches,
            gpus,
            forward=lambda _, s: max(each[s].forward, each[s].host / 2),
            backward=lambda _, s: max(each[s].backward, each[s].host / 2),
            transfer=E * tokens * model.hidden / card.profile.send,
        )
        seconds, bubble = line.time + max(time.update for time in each), line.bubble
    worst = max(held, key=lambda memory: memory.peak)
    return "pipeline", worst, most, seconds, count * tokens, bubble, stages


def _plain(value: Any) -> Any:
    """As JSON has it, with what a Memory sums up."""
    if isinstance(value, Memory):
        return value._asdict() | {"resident": value.resident, "peak": value.peak}
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, (tuple, frozenset)):
        return [*map(_plain, value if isinstance(value, tuple) else sorted(value))]
    return value


def plan(model: Model, setup: Setup, *, gpu: str | Card = "h200", gpus: int = 1, tokens: int | None = None) -> Plan:
    """Every layout of this training on so many GPUs, the best first.

    Memory: none on a device.

    Args:
      model: what :func:`read_model` gives.
      setup: adapters, length of a sequence and so on; its ``fuse`` and ``checkpointing`` are tried both ways.
      gpu: a key of ``fdora.predict.GPUS``, or a card.
      tokens: of a microbatch, a multiple of ``setup.length``; one sequence by default.

    Raises:
      FdoraError: an argument is out of range, or unknown.

    References: peaks and rates are checked against bench/results/h200/peaks.json.
    """
    check_setup(setup)
    count = setup.length if tokens is None else tokens
    if type(count) is not int or count < 1 or count % setup.length:
        raise fail("jobs.plan", "tokens", f"a multiple of the length {setup.length}", repr(count), "Sequences are whole.")
    check_positive("jobs.plan", "gpus", gpus, "It is how many there are.")
    found = gpu if isinstance(gpu, Card) else card(gpu)
    asked = Plan(model, setup, found, gpus, count, ())
    return asked._replace(layouts=tuple(ways(asked)))
