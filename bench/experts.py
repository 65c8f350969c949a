"""The experts of a mixture: dora_experts and dora_experts_mlp against loops over experts and against grouped_mm.

    python -m bench.experts --device cuda --json FILE
    python -m bench.experts --device cuda --quick

bf16 x and W, norms given. GPU time by CUDA graph (wall time on a CPU), ways in turns in one run, medians; ``wall`` is wall time
per call with the host in it. ``fwd`` runs under no_grad, ``fwd_bwd`` takes gradients of x, of the adapters and, in an MLP, of
the gates. Each token has k experts; the lengths of their segments differ, and end wherever they end. ``kept`` is MiB that a
forward keeps for its backward beside parameters and x.

    layer   gate_up on tokens that are sorted already, by offsets
    mlp     tokens by ids and gates through gate_up, silu and down, and back

    frozen_loop     F.linear for each expert: no adapter; lengths known on the host, as for all loops
    lora_loop       LoRA for each expert by F.linear
    loop            dora_linear for each expert
    frozen_grouped  torch.nn.functional.grouped_mm: no adapter
    lora_grouped    LoRA by grouped_mm
    fdora           dora_experts, dora_experts_mlp
    fdora_inside    the same, its norms computed in every call
    fdora_fp8       fdora on e4m3 codes with scales of rows, 8-bit products in both directions

An MLP of a rival takes the rows of each token by an index that is there, and adds them up by index_add; fdora sorts in its
call.

Before it is timed every fdora way is compared with float64: y and the gradients of x and the gates, in a layer of all
parameters. A way that cannot run is listed with its reason, and a wrong fdora fails the command at its end, but for 8 bits,
whose error with the dense W is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.multi import timed
from bench.suite import One, Some, Suite
from bench.truth import errors as errors_of
from bench.truth import exact, gradients
from bench.ways import BF16, DTYPES, S, Way, away, by_mode, checked, differentiated, fresh, lora, ratios
from fdora.functional import DoraLayer, dora_experts, dora_experts_mlp, dora_linear
from fdora.quant import QuantWeight, quantize

MODELS = {  # experts, experts of a token, hidden size, F
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "tiny": (3, 2, 48, 32),
}


class Stack(NamedTuple):
    """One layer of all experts, its adapters away from their start."""

    W: Tensor | QuantWeight
    A: Tensor
    B: Tensor
    m: Tensor
    norm: Tensor

    @classmethod
    def random(cls, E: int, N: int, K: int, r: int, adapter: torch.dtype, generator: torch.Generator) -> Stack:
        W = torch.randn(E, N, K, generator=generator, device=generator.device, dtype=BF16).mul_(K**-0.5)
        return cls(W, *away(W, r, adapter, generator))

    def in_codes(self) -> Stack:
        """W rounded to e4m3; the norm stays that of the dense W."""
        return self._replace(W=quantize(self.W.flatten(0, 1), "fp8", block="row", dtype=BF16))

    def layer(self, norm: bool = True) -> DoraLayer:
        return DoraLayer(self.W, self.A, self.B, self.m, S, None, self.norm if norm else None)


class Case(NamedTuple):
    """Tokens, their experts and both layers. ``order``: the pairs of tokens and experts, sorted; ``lengths`` of the experts."""

    x: Tensor
    up: Stack
    down: Stack
    ids: Tensor
    gates: Tensor
    order: Tensor
    offsets: Tensor
    lengths: list[int]

    @classmethod
    def random(cls, model: str, T: int, r: int, adapter: torch.dtype, device: str) -> Case:
        E, k, H, wide = MODELS[model]
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(T, H, generator=generator, device=device, dtype=BF16)
        up, down = (Stack.random(E, N, K, r, adapter, generator) for N, K in ((2 * wide, H), (H, wide)))
        # Gumbel noise on logits that favour some experts: segments of different lengths
        logits = torch.randn(E, generator=generator, device=device) * 0.5
        noise = torch.rand(T, E, generator=generator, device=device).clamp(1e-9, 1 - 1e-7).log().neg().log().neg()
        weight, ids = (logits + noise).topk(k)
        key, order = ids.reshape(-1).sort(stable=True)
        lengths = torch.bincount(key, minlength=E).tolist()
        offsets = torch.tensor(lengths).cumsum(0).to(torch.int32).to(device)
        return cls(x, up, down, ids, weight.softmax(1), order, offsets, lengths)

    def fresh(self, name: str) -> Case:
        """Leaves of a way's own."""
        stacks = {label: fresh(getattr(self, label), "ABm") for label in ("up", "down")}
        if name in CODES:
            stacks = {label: stack.in_codes() for label, stack in stacks.items()}
        return fresh(self, ("x", "gates"))._replace(**stacks)


def linear_of(name: str) -> Callable[[Tensor, Stack, Case], Tensor]:
    """Sorted rows through one layer."""
    if name.startswith("fdora"):
        norm = (lambda p: None) if name == "fdora_inside" else (lambda p: p.norm)
        return lambda x, p, i: dora_experts(x, p.W, p.A, p.B, p.m, s=S, offsets=i.offsets, norm=norm(p), **CODES.get(name, {}))
    if name == "frozen_grouped":
        return lambda x, p, i: F.grouped_mm(x, p.W.mT, offs=i.offsets)
    if name == "lora_grouped":
        return lora_grouped
    return partial(one_by_one, LOOPS[name])


def one_by_one(layer: Callable[..., Tensor], x: Tensor, p: Stack, i: Case) -> Tensor:
    return torch.cat([layer(part, *(t[e] for t in p)) for e, part in enumerate(x.split(i.lengths)) if len(part)])


CODES = {"fdora_fp8": {"compute": "fp8", "grad_compute": "fp8"}}
# Of one expert's tokens: x, W, A, B, m and the norm.
LOOPS = {
    "frozen_loop": lambda x, W, *_: F.linear(x, W),
    "lora_loop": lora,
    "loop": lambda x, W, A, B, m, norm: dora_linear(x, W, A, B, m, s=S, norm=norm),
}


def in_float64(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, norm: Tensor) -> Tensor:
    return exact(x, W, A, B, m, S)


def lora_grouped(x: Tensor, p: Stack, i: Case) -> Tensor:
    h = F.grouped_mm(x, p.A.to(x.dtype).mT, offs=i.offsets)
    return F.grouped_mm(x, p.W.mT, offs=i.offsets) + S * F.grouped_mm(h, p.B.to(x.dtype).mT, offs=i.offsets)


def mlp(linear: Callable[[Tensor, Stack, Case], Tensor], i: Case) -> Tensor:
    """Rows of each token by an index that is there, through both layers, and added up by index_add."""
    at = i.order // i.ids.shape[1]
    gate, up = linear(i.x[at], i.up, i).chunk(2, 1)
    y = linear(F.silu(gate) * up, i.down, i) * i.gates.reshape(-1)[i.order, None]
    return torch.zeros_like(i.x).index_add(0, at, y.to(i.x.dtype))


def leaves_of(name: str, **stacks: Stack) -> dict[str, Tensor]:
    parts = "" if "frozen" in name else "AB" if "lora" in name else "ABm"
    return {f"{n}_{label}": getattr(p, n) for label, p in stacks.items() for n in parts}


def layer_way(name: str, i: Case) -> Way:
    i = i.fresh(name)
    rows = i.x.detach()[i.order // i.ids.shape[1]].requires_grad_()
    linear, dy = linear_of(name), torch.randn(len(rows), i.up.m.shape[1], device=rows.device).to(BF16)
    return differentiated(lambda: linear(rows, i.up, i), {"x": rows, **leaves_of(name, up=i.up)}, dy)


def mlp_way(name: str, i: Case) -> Way:
    i = i.fresh(name)
    leaves = {"x": i.x, "gates": i.gates, **leaves_of(name, up=i.up, down=i.down)}
    dy, given = torch.randn(i.x.shape, device=i.x.device).to(BF16), name != "fdora_inside"
    layers, linear = (i.up.layer(given), i.down.layer(given)), linear_of(name)
    if name.startswith("fdora"):
        how = CODES.get(name, {})
        return differentiated(lambda: dora_experts_mlp(i.x, *layers, ids=i.ids, gates=i.gates, **how), leaves, dy)
    return differentiated(lambda: mlp(linear, i), leaves, dy)


def layer_errors(way: Way, i: Case) -> dict[str, float]:
    """Of y and of all gradients."""

    def call(t: dict[str, Tensor]) -> Tensor:
        return one_by_one(in_float64, t["x"], i.up._replace(**{n: t[f"{n}_up"] for n in "ABm"}), i)

    return errors_of(way.both(), gradients(call, way.leaves, way.dy))


def mlp_errors(way: Way, i: Case) -> dict[str, float]:
    """Of y, and of the gradients of x and of the gates."""

    def call(t: dict[str, Tensor]) -> Tensor:
        return mlp(partial(one_by_one, in_float64), i._replace(**t))

    return errors_of(way.both(), gradients(call, {n: way.leaves[n] for n in ("x", "gates")}, way.dy), ("y", "dx", "dgates"))


WAYS = ("frozen_loop", "lora_loop", "loop", "frozen_grouped", "lora_grouped", "fdora", "fdora_inside", "fdora_fp8")
OURS = ("loop", "fdora", "fdora_inside")
TOLERANCE = 1e-2


def run(kind: str, model: str, T: int, r: int, options) -> list[dict]:
    case = Case.random(model, T, r, DTYPES[options.adapter], options.device)
    build, errors = (layer_way, layer_errors) if kind == "layer" else (mlp_way, mlp_errors)
    found, error, failed, _, kept = checked(
        options.ways,
        lambda name: build(name, case),
        lambda name, way: errors(way, case) if name in (*OURS, *CODES) else (way.both(), {})[1],
        TOLERANCE,
        options.device,
        OURS,
        given=[case.x, case.ids, case.gates, case.order, case.offsets, *case.up, *case.down],
    )
    error = {name: each for name, each in error.items() if each}
    rows = []
    for mode, fns in by_mode(found):
        ms, wall = timed(fns, failed, options)
        facts = {"kind": kind, "model": model, "T": T, "r": r, "adapter": options.adapter, "mode": mode}
        row = {**facts, "ms": ms, "wall": wall, "ratio": ratios(ms, (("fdora", n) for n in ms))}
        rows.append(row | {"error": error, "kept": kept, "failed": dict(failed)})
    return rows


def cases(options) -> dict[str, tuple]:
    every = product(options.models, options.r, options.T, ("mlp", "layer"))
    return {f"{kind} {model} T={T} r={r}": (kind, model, T, r) for model, r, T, kind in every}


OPTIONS = {
    "--models": Some(MODELS, ["mixtral", "qwen3-30b", "gpt-oss-20b"]),
    "--T": ([64, 4096], "tokens, each of k experts"),
    "--r": [16, 64],
    "--adapter": One(DTYPES, "bf16"),
    "--ways": Some(WAYS),
    "--loop-ms": (20.0, "of wall time, at least, in one measurement"),
}


def measure(suite):
    suite.set(failed=suite.failed)
    found = dict(cases(suite.options))
    for name in suite.cases(found):
        suite.attempt(name, partial(run, *found[name], suite.options))
    suite.end(*OURS, "layer", "mlp")


main = Suite(measure, OPTIONS, runs=9, seconds=math.inf, quick={"T": [4096], "r": [16], "runs": 3})
