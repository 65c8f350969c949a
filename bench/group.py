"""Layers that share their input: q/k/v, gate/up and the whole MLP, each as one call, as separate calls, as others adapt them.

    python -m bench.group --device cuda --jobs 8 --json FILE
    python -m bench.group --device cuda --jobs 8 --quick

bf16 x and W, norms given. GPU time by CUDA graph (wall time on a CPU), ways in turns in one run, medians. ``fwd`` runs under
no_grad, ``fwd_bwd`` takes gradients of x and the adapters. ``bare`` is the eight matrix products of each layer, each writing
its own output, and nothing elementwise. ``axolotl_*`` and ``unsloth_lora`` are their functions for such layers, from
``--rival-path`` or installed (bench/checkouts.py); Axolotl's DoRA keeps the norms from call to call, as they are given here.
Every way is compared with float64 before it is timed; one that cannot run is listed
with its reason, and a wrong fdora fails the command at its end. ``kept_mb`` is what autograd keeps between the two directions
beside x and the parameters (the output of the call included, where it is kept). The JSON is rewritten after every case.

Everything runs on one stream of its own: a graph cannot be captured where a leaf's node was made on another one. Axolotl's
kernel of the norm compiles for minutes at r = 384; up to 64 for a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkouts import RIVAL_PATH, axolotl_group, unsloth_group
from bench.clock import Timer, anchor_graph, launches_of, medians, quick_timer, wall_timer
from bench.rivals import peft_layer
from bench.suite import Some, Suite
from bench.truth import exact
from bench.ways import (
    DTYPES,
    LEAVES,
    Inputs,
    S,
    Truths,
    Way,
    against,
    bare,
    by_formula,
    by_mode,
    checked,
    differentiated,
    fresh,
    ratios,
    warm,
)
from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_mlp

MODELS = {  # hidden size, N of q, k and v, width of the MLP
    "llama8b": (4096, (4096, 1024, 1024), 14336),
    "qwen8b": (4096, (4096, 1024, 1024), 12288),
    "tiny": (64, (64, 32, 32), 96),
}
PARTS = ("qkv", "gate_up", "mlp")
RIVALS = ("peft_lora", "unsloth_lora", "axolotl_lora", "axolotl_dora")
WAYS = ("bare", *RIVALS, "separate", "fdora")
TOLERANCE = {"qkv": 5e-3, "gate_up": 5e-3, "mlp": 1.5e-2}  # relative L2; in the MLP each layer reads what another rounded


class Case(NamedTuple):
    """One Inputs for each layer (x and dy of the first ones are the case's), and what is to be differentiated."""

    part: str
    x: Tensor
    layers: list[Inputs]
    dys: list[Tensor]

    @classmethod
    def random(cls, model: str, part: str, M: int, r: int, adapter: str, device: str) -> Case:
        K, qkv, width = MODELS[model]
        shapes = {"qkv": [(K, n) for n in qkv], "gate_up": [(K, width)] * 2, "mlp": [(K, width), (K, width), (width, K)]}[part]
        layers = [Inputs.random(M, k, n, r, DTYPES[adapter], device) for k, n in shapes]
        for i, layer in enumerate(layers):  # not three times the same: other rows first
            with torch.no_grad():
                for t in (layer.W, layer.B, layer.m, layer.norm):
                    t.copy_(t.roll(7 * i, 0))
        return cls(part, layers[0].x, layers, [layers[-1].dy] if part == "mlp" else [layer.dy for layer in layers])

    def fresh(self) -> Case:
        """The same memory under leaves of their own. A leaf's node remembers the stream it was made on, and lives as long as a
        graph that a way leaves behind: another way's CUDA graph would have to wait for that stream, which spoils it."""
        layers = [fresh(i, "xABm") for i in self.layers]
        return self._replace(x=layers[0].x, layers=layers)

    def leaves(self) -> dict[str, Tensor]:
        named = {f"{n}{i}": getattr(layer, n) for i, layer in enumerate(self.layers) for n in ("A", "B", "m")}
        return {"x": self.x, **named}


def by_layers(case: Case, layers: list[Callable[[Tensor], Tensor]]) -> list[Tensor]:
    if case.part != "mlp":
        return [layer(case.x) for layer in layers]
    gate, up, down = layers
    return [down(F.silu(gate(case.x)) * up(case.x))]


def build(name: str, case: Case, rival_path: Sequence[Path] = ()) -> Way:
    case = case.fresh()
    leaves, truth = case.leaves(), "dora"
    if name == "bare":
        return bare(*(i._replace(x=case.x if i.x.shape == case.x.shape else i.x) for i in case.layers))
    if name in ("unsloth_lora", "axolotl_lora", "axolotl_dora"):
        of, truth = name.split("_")
        own = {f"m{k}": i.m.detach().clone().requires_grad_() for k, i in enumerate(case.layers)}  # norms are kept on them
        leaves = {n: own.get(n, t) for n, t in leaves.items() if n[0] in LEAVES[truth]}
        layers = [(i.W, i.A, i.B, leaves.get(f"m{k}")) for k, i in enumerate(case.layers)]
        call = partial({"unsloth": unsloth_group, "axolotl": axolotl_group}[of](rival_path, case.part, layers, S), case.x)
    elif name == "peft_lora":
        built, truth = [peft_layer(i.W, i.A, i.B, None, S) for i in case.layers], "lora"
        leaves = {"x": case.x} | {f"{n}{i}": t for i, (_, own) in enumerate(built) for n, t in own.items()}
        call = partial(by_layers, case, [layer for layer, _ in built])
    elif name == "separate":
        given = [{"W": i.W, "A": i.A, "B": i.B, "m": i.m, "norm": i.norm} for i in case.layers]
        call = partial(by_layers, case, [partial(dora_linear, s=S, **each) for each in given])
    else:
        members = [DoraLayer(i.W, i.A, i.B, i.m, S, norm=i.norm) for i in case.layers]

        def call() -> list[Tensor]:
            return [dora_mlp(case.x, *members)] if case.part == "mlp" else list(dora_linear_group(case.x, members))

    return differentiated(call, leaves, case.dys, truth)


def truths(case: Case) -> Truths:
    """Outputs and gradients of a formula, dora or lora."""

    def call(kind: str, t: dict[str, Tensor]) -> list[Tensor]:
        own = [{"W": i.W, "A": t[f"A{k}"], "B": t[f"B{k}"], "m": t.get(f"m{k}")} for k, i in enumerate(case.layers)]
        return by_layers(case._replace(x=t["x"]), [partial(exact, s=S, **each) for each in own])

    return by_formula(call, case.leaves(), case.dys)


def compile_case(name: str, rival_path: Sequence[Path], *shape) -> None:
    warm(build(name, Case.random(*shape, "cuda"), rival_path))


def timed(case: Case, mode: str, fn: Callable[[], object], where: tuple) -> Timer:
    """``where``: what a graph is captured into; empty on a CPU."""
    if not where:
        return wall_timer(fn, "cpu", 0)
    flops = sum(2 * i.x.shape[0] * i.W.numel() for i in case.layers)
    return quick_timer(fn, launches_of((1 if mode == "fwd" else 3) * (0.05 + flops / 6e11)), *where)


def rows_of(model: str, part: str, M: int, r: int, adapter: str, options, where: tuple) -> list[dict]:
    """Two rows: forward, and both directions."""
    device = options.device
    case = Case.random(model, part, M, r, adapter, device)
    ways, error, failed, peak, kept = checked(
        options.ways,
        lambda name: build(name, case, options.rival_path),
        against(truths(case)),
        TOLERANCE[part],
        device,
        ("separate", "fdora"),
        options.ways,
        [t for i in case.layers for t in (i.W, i.norm)],
    )
    rows = []
    for mode, fns in by_mode(ways):
        timers = failed.attempt(fns, lambda name: timed(case, mode, fns[name], where))
        ms = {name: round(value, 5) for name, value in medians(timers, options.runs).items()}
        row = {"model": model, "part": part, "M": M, "r": r, "adapter": adapter, "mode": mode, "ms": ms}
        row["ratio"] = ratios(ms, (("fdora", n) for n in ms))
        rows.append(row | {"peak_mb": peak, "kept_mb": kept, "error": error, "failed": dict(failed)})
    return rows


OPTIONS = {
    "--models": Some(MODELS, ["llama8b", "qwen8b"]),
    "--parts": Some(PARTS),
    "--M": [4096],
    "--r": [16, 384],
    "--adapter": (Some(DTYPES, ["bf16"]), "bf16,fp32"),
    "--ways": Some(WAYS),
    **RIVAL_PATH,
}


def cases(options):
    return product(options.models, options.parts, options.M, options.r, options.adapter)


def ahead(options):
    return compile_case, [(name, options.rival_path, *case) for case in cases(options) for name in options.ways]


def measure(run):
    options = run.options
    stream = None if options.device == "cpu" else torch.cuda.Stream()
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        where = () if stream is None else (anchor_graph(), stream)
        for case in run.cases(cases(options)):
            run.add(*rows_of(*case, options, where))
    run.end("fdora", "separate")


main = Suite(
    measure,
    OPTIONS,
    runs=9,
    seconds=math.inf,
    quick={"models": ["llama8b"], "parts": ["qkv", "mlp"], "M": [4096, 512], "r": [16, 64], "runs": 5},
    ahead=ahead,
)
