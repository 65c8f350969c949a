"""What a training step takes on one GPU: memory, component by component, and time: what its kernels take one after the other,
or what the host takes to start them.

    step = max( microbatches (forward + backward) + update,  microbatches x host )
    time = sum over kernels of  start + max(flops / rate, bytes / bandwidth)

The rates are measured (profiles/, written by ``bench.profile_gpu``), or where they are not the maker's, for which times are
floors; kernels and bytes are those of :mod:`fdora.jobs.plan.record`. An update forms all norms again, for A and B are new, and
moves each parameter with its gradient and states. A layer that is checkpointed keeps its input alone, and runs forward again
before its backward.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import check_positive, fail
from fdora.jobs.plan.model import OPTIMIZERS, E, Model, Part, Setup, check_setup
from fdora.jobs.plan.record import Kernel, pieces, sizes
from fdora.predict import GPUS

# Work spaces that cuBLAS allocates through torch on Hopper, 32 MiB each: of the thread of forward, of that of backward, and
# that of cublasLt. bench/results/h200/peaks.json: 99 to 107 MiB beside parameters, of which some are norms.
WORKSPACE = 3 * 32 * 2**20
# Of a GPU's memory: CUDA's own, and what the pool of the allocator cannot use.
SPARE = 0.06
GRAIN = 256  # tokens


class Profile(NamedTuple):
    """Measured rates per second, and seconds; see ``bench/profile_gpu.py``."""

    flops: float
    bytes: float
    start: float
    attention: float
    attention_backward: float
    norm16: float  # flops of the norms, of adapters of 16 and of 32 bits
    norm32: float
    host: float
    layer: float
    gather: float = 0.0  # 0: not measured
    send: float = 0.0

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        rates = {"product": self.flops, "attention": self.attention, "attention_backward": self.attention_backward}
        return sum(self.start + max(each.flops / rates[each.kind], each.bytes / self.bytes) for each in kernels)


class Memory(NamedTuple):
    """Bytes of a step by component. ``activations``: what forward keeps; ``temporary``: what exists beside it at the peak, such
    as gradients of activations."""

    linears: int
    embeddings: int
    adapters: int
    optimizer: int
    gradients: int
    norms: int
    workspace: int
    activations: int
    temporary: int
    at: str

    @property
    def resident(self) -> int:
        """Before a step."""
        return self.linears + self.embeddings + self.adapters + self.optimizer + self.norms + self.workspace

    @property
    def peak(self) -> int:
        return self.resident + self.gradients + self.activations + self.temporary


def walk(model: Model, setup: Setup, tokens: int, part: Part) -> tuple[int, int, str]:
    """Bytes that forward keeps, the most at once, and where that is."""
    x, alive, seen = E * tokens * model.hidden, 0, []
    gradients = 0 if setup.microbatches > 1 else sizes(model, setup)[2]
    found = [(piece, setup.checkpointing and piece.layer) for piece in pieces(model, setup, tokens, part)]
    for piece, again in found:
        seen.append((alive + piece.forward.most, f"forward: {piece.forward.at}"))
        alive += x if again else piece.kept
    kept = alive
    for piece, again in reversed(found):
        alive -= x if again else piece.kept
        if again:  # beside the gradient of its output
            seen.append((alive + x + piece.forward.most, f"forward again: {piece.forward.at}"))
        seen.append((alive + again * x + piece.backward.most, f"backward: {piece.backward.at}"))
        alive += gradients * piece.layer
    return kept, *max(seen)


def between(setup: Setup, tokens: int, of: Callable[[int], Sequence[float]]) -> list[float]:
    """Recorded are powers of two, where all tokens have a mask by all also eight numbers between these; what is between two of
    them is nearly linear."""
    step = max(1, 2 ** (tokens.bit_length() - 1) // (8 if setup.packed else 1))
    low, rest = tokens // step * step, tokens % step
    return [a + (b - a) * rest / step for a, b in zip(of(low), of(low + step if rest else low), strict=True)]


def memory(model: Model, setup: Setup, tokens: int, part: Part | None = None, in_flight: int = 1) -> Memory:
    """The memory of a step with ``tokens`` in a microbatch; a pipeline's stage keeps ``in_flight`` microbatches at once."""
    check_setup(setup)
    for arg, value in {"tokens": tokens, "in_flight": in_flight}.items():
        check_positive("jobs.plan", arg, value, "It is how many there are at once.")
    part = Part(model.layers) if part is None else part
    linears, rest, adapters = (part.layers * each for each in sizes(model, setup))
    tables = 1 if model.tied and part.first and part.last else part.first + part.last
    kept, most = map(round, between(setup, tokens, lambda n: walk(model, setup, n, part)[:2]))
    norms = 4 * len(setup.adapters) * part.layers * sum(model.linears[name][0] for name in setup.targets)
    return Memory(
        linears,
        rest + E * model.hidden * (tables * model.vocab + part.last),
        adapters,
        OPTIMIZERS[setup.optimizer] * adapters,
        adapters if setup.microbatches > 1 else 0,
        norms,
        WORKSPACE,
        in_flight * kept,
        most - kept,
        walk(model, setup, 2 ** (tokens.bit_length() - 1), part)[2],
    )


def capacity(model: Model, setup: Setup, budget: int, part: Part | None = None, in_flight: int = 1) -> int:
    """Tokens that a microbatch may hold, in multiples of 256; 0 where nothing fits."""
    check_positive("jobs.plan", "budget", budget, "It is in bytes.")

    def full(n: int) -> bool:
        return memory(model, setup, n * GRAIN, part, in_flight).peak > budget

    most = bisect_left(range(17), True, key=lambda power: full(2**power))  # first by numbers that are recorded
    return most and GRAIN * (bisect_left(range(2**most), True, 2 ** (most - 1), key=full) - 1)


FOLDER = Path(__file__).parent / "profiles"


class Card(NamedTuple):
    """A GPU with its memory and rates, as the planner uses it."""

    name: str
    bytes: int  # of memory
    profile: Profile
    measured: bool  # or the maker's published rates, by which times are floors


class Time(NamedTuple):
    """The predicted seconds of a microbatch, and of the update that comes once in a step."""

    forward: float
    backward: float
    host: float
    update: float

    def step(self, microbatches: int) -> float:
        return max(microbatches * (self.forward + self.backward) + self.update, microbatches * self.host)


def card(gpu: str, file: str | Path | None = None) -> Card:
    """A GPU by its key in ``fdora.predict.GPUS``, or with a measured profile of one's own in ``file``.

    Raises:
      FdoraError: no such GPU, or no such file.
    """
    key = gpu.lower()
    if key not in GPUS:
        raise fail("jobs.plan", "gpu", f"one of {', '.join(GPUS)}", repr(gpu), "For another measure one: bench.profile_gpu.")
    rate = GPUS[key]
    bytes = int(rate.gib * 2**30)
    own = Path(file) if file else FOLDER / f"{key}.json"
    if file or own.exists():
        found = read(own)
        if found.get("gpu") != key:
            raise fail("jobs.plan", "profile", f"of a {key}", repr(found.get("gpu")), "Pass the file that was measured there.")
        return Card(rate.name, found.get("memory") or bytes, Profile(**found["profile"]), True)
    floors = Profile(rate.flops, rate.bytes, 0.0, rate.flops, rate.flops, rate.flops, rate.tf32, 0.0, 0.0)
    return Card(rate.name, bytes, floors, False)


@lru_cache(8)
def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        Profile(**found["profile"])
        return found
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise fail(
            "jobs.plan", "profile", "a file that bench.profile_gpu wrote", f"{type(error).__name__} for {path}", "Check it."
        ) from error


def times(model: Model, setup: Setup, tokens: int, profile: Profile, part: Part | None = None) -> Time:
    """The predicted time of a microbatch of so many tokens, and of an update."""
    part = Part(model.layers) if part is None else part

    def seconds(tokens: int) -> tuple[float, float, float]:
        forward = backward = host = 0.0
        for piece in pieces(model, setup, tokens, part):
            again = setup.checkpointing and piece.layer
            there, back = profile.seconds(piece.forward.kernels), profile.seconds(piece.backward.kernels)
            own = (piece.forward.ops + piece.backward.ops) * profile.host + piece.forward.calls * profile.layer
            forward += there
            backward += back + again * there
            host += own * (1 + again / 2)
        return forward, backward, host

    linears, _, adapters = (part.layers * each for each in sizes(model, setup))
    rate = profile.norm16 if setup.adapter_bytes == 2 else profile.norm32
    norms = len(setup.adapters) * 2 * part.layers * setup.width * sum(N * K for N, K in model.linears.values()) / rate
    states = 3 + 2 * OPTIMIZERS[setup.optimizer]  # parameter and states read and written, its gradient read
    update = max(linears / profile.bytes, norms) + states * adapters / profile.bytes
    forward, backward, host = between(setup, tokens, seconds)
    return Time(forward, backward, host, update)
