"""Memory of training on one GPU, component by component, and how many tokens a microbatch may hold."""

from __future__ import annotations

from typing import NamedTuple

from fdora._check import check_positive
from fdora.jobs.plan.decoder import E, decoder
from fdora.jobs.plan.model import Model, Part
from fdora.jobs.plan.setup import OPTIMIZERS, WEIGHTS, Setup, check_setup
from fdora.jobs.plan.tape import Peaks, walk

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


def peaks(model: Model, setup: Setup, tokens: int, part: Part) -> Peaks:
    _, _, adapters = elements(model, setup, part)
    before = adapters * setup.adapter_bytes if setup.microbatches > 1 else 0
    net = decoder(model, setup, tokens, part)
    return walk(net.segments, net.sizes, net.inputs, before)


def memory(model: Model, setup: Setup, tokens: int, part: Part | None = None, in_flight: int = 1) -> Memory:
    """The memory of a step with ``tokens`` in a microbatch; a pipeline's stage keeps ``in_flight`` microbatches at once."""
    check_setup(setup)
    for arg, value in {"tokens": tokens, "in_flight": in_flight}.items():
        check_positive("jobs.plan", arg, value, "It is how many there are at once.")
    part = Part(model.layers) if part is None else part
    frozen, rest, adapters = elements(model, setup, part)
    found = peaks(model, setup, tokens, part)
    gradients = adapters * setup.adapter_bytes if setup.microbatches > 1 else 0
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
