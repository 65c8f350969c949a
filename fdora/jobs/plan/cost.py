"""What a training step takes on one GPU: memory, component by component, and time: what its kernels take one after the other,
or what the host takes to start them.

    step = max( microbatches (forward + backward) + update,  microbatches x host )

The rates are measured (profiles/, written by ``bench.profile_gpu``), or where they are not the maker's, for which times are
floors; kernels and bytes are those of :mod:`fdora.jobs.plan.tape`. An
update forms all norms again, for A and B are new, and moves each parameter with its gradient and states.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import check_positive, fail
from fdora.jobs.plan.decoder import E, decoder
from fdora.jobs.plan.model import Model, Part
from fdora.jobs.plan.setup import OPTIMIZERS, WEIGHTS, Setup, check_setup
from fdora.jobs.plan.tape import Profile, walk
from fdora.predict import GPUS

# Work spaces that cuBLAS allocates through torch on Hopper, 32 MiB each: of the thread of forward, of that of backward, and
# that of cublasLt. bench/results/h200/peaks.json: 99 to 107 MiB beside parameters, of which some are norms.
WORKSPACE = 3 * 32 * 2**20
# Of a GPU's memory: CUDA's own, and what the pool of the allocator cannot use.
SPARE = 0.06
GRAIN = 256  # tokens


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


def elements(model: Model, setup: Setup, part: Part) -> tuple[int, int, int]:
    """Of frozen linears; of embedding, head and norms; of adapters."""
    shapes = model.linears
    frozen = sum(N * K for N, K in shapes.values())
    adapters = sum(setup.adapter_elements(*shapes[name]) for name in setup.targets)
    norms = (4 if model.sandwich else 2) * model.hidden + (2 * model.head_dim if model.head_norms else 0)
    biases = sum(shapes[name][0] for name in model.biases)
    table = model.vocab * model.hidden
    tables = 1 if model.tied and part.first and part.last else part.first + part.last
    rest = part.layers * (norms + biases) + tables * table + (model.hidden if part.last else 0)
    return part.layers * frozen, rest, part.layers * adapters


def memory(model: Model, setup: Setup, tokens: int, part: Part | None = None, in_flight: int = 1) -> Memory:
    """The memory of a step with ``tokens`` in a microbatch; a pipeline's stage keeps ``in_flight`` microbatches at once."""
    check_setup(setup)
    for arg, value in {"tokens": tokens, "in_flight": in_flight}.items():
        check_positive("jobs.plan", arg, value, "It is how many there are at once.")
    part = Part(model.layers) if part is None else part
    frozen, rest, adapters = elements(model, setup, part)
    gradients, net = adapters * setup.adapter_bytes if setup.microbatches > 1 else 0, decoder(model, setup, tokens, part)
    found = walk(net.segments, net.sizes, net.inputs, gradients)
    norms = 4 * len(setup.adapters) * part.layers * sum(model.linears[name][0] for name in setup.targets)
    most = max(found.most, found.gradients)  # the optimizer makes nothing
    return Memory(
        int(frozen * WEIGHTS[setup.weights][0]),
        E * rest,
        adapters * setup.adapter_bytes,
        OPTIMIZERS[setup.optimizer] * adapters * setup.adapter_bytes,
        gradients,
        norms,
        WORKSPACE,
        in_flight * found.kept,
        most - found.kept,
        found.at,
    )


def capacity(model: Model, setup: Setup, budget: int, part: Part | None = None, in_flight: int = 1) -> int:
    """Tokens that a microbatch may hold, in multiples of 256; 0 where nothing fits."""
    check_positive("jobs.plan", "budget", budget, "It is in bytes.")

    def fits(n: int) -> bool:
        return memory(model, setup, n * GRAIN, part, in_flight).peak <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**16:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * GRAIN


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
    forward = backward = host = 0.0
    for segment in decoder(model, setup, tokens, part).segments:
        for op in segment.ops:
            there, back = profile.seconds(op.work.forward), profile.seconds(op.work.backward)
            kernels = 0 if op.work.calls else len(op.work.forward) + len(op.work.backward)
            own = kernels * profile.host + op.work.calls * profile.layer
            forward += there
            backward += back + (there if segment.checkpointed else 0.0)
            host += own * (1.5 if segment.checkpointed else 1.0)
    frozen, _, adapters = elements(model, setup, part)
    stored = frozen * WEIGHTS[setup.weights][0]
    rate = profile.norm16 if setup.adapter_bytes == 2 else profile.norm32
    norms = len(setup.adapters) * 2 * frozen * setup.width / rate
    states = 3 + 2 * OPTIMIZERS[setup.optimizer]  # parameter and states read and written, its gradient read
    update = max(stored / profile.bytes, norms) + states * adapters * setup.adapter_bytes / profile.bytes
    return Time(forward, backward, host, update)
