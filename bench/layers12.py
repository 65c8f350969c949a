"""Twelve decoder layers of Qwen3-8B, all seven linears adapted: what a forward and a training step cost.

    python -m bench.layers12 --device cuda --r 384 --json FILE

One sequence of 4096 tokens, loss on its last 1024. Inference (no_grad) and gradient (of x and all adapters; ``frozen``: of x
alone), also with activation checkpointing per layer, eager and with torch.compile per layer. Ways share the weights and
have equal adapters, away from their start. ``fdora`` is given its norms, computed once per optimizer step (``norms_ms``, for
all layers, is in no other time); ``fdora_inside`` computes them in every call. ``peft_fdora`` is PEFT's DoRA after
``use_fdora``, which asks in every call whether its norm still holds. Wall time until the GPU is done, median of turns; peak
memory above weights and adapters. Outputs and gradients of ``fdora`` and ``peft_fdora`` are compared with those of PEFT's DoRA,
while nothing is dropped. float32 adapters run under bf16 autocast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bench import steps
from bench.clock import medians, wall_timer
from bench.decoder import MOST_APART, agreement, judge, left
from bench.rivals import paths
from bench.steps import SIZES, Cell, Stack
from bench.suite import COMPILED, Run, Some, Suite, stack
from bench.ways import S
from fdora.functional import dora_linear, dora_norm

WAYS = ("frozen", "peft_lora", "peft_dora", "peft_fdora", "fdora", "fdora_inside")
MODES = ("inference", "gradient", "gradient_checkpointing")


class Adapted(nn.Module):
    """A linear that calls dora_linear; ``c`` is its norm, None to have it computed in the call."""

    def __init__(self, W: Tensor, A: Tensor, B: Tensor, m: Tensor, inside: bool, dropout: float, mode: str):
        super().__init__()
        self.dropout, self.mode = nn.Dropout(dropout), mode
        self.W, self.A, self.B, self.m = W, *(nn.Parameter(t.clone()) for t in (A, B, m))
        self.c = None
        if not inside:
            self.refresh()

    def refresh(self) -> None:
        self.c = dora_norm(self.W, self.A, self.B, s=S)

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout.p if self.dropout.training else 0.0
        return dora_linear(x, self.W, self.A, self.B, self.m, s=S, norm=self.c, dropout_p=p, dropout_mode=self.mode)


def adapted(way: str, base: Stack, values: dict, dropout: float) -> tuple[Stack, dict[str, Tensor]]:
    """A model of this way around the same weights, and its leaves."""
    if not way.startswith("fdora"):
        return steps.adapted(way, base, values, dropout)
    (model, _), leaves = steps.adapted("frozen", base, values), {}
    how = {"inside": "inside" in way, "dropout": dropout, "mode": "lora" if way.endswith("lora_dropout") else "peft"}
    for name, value in values.items():
        parent, _, child = name.rpartition(".")
        own = Adapted(model.get_submodule(name).weight, *value, **how)
        setattr(model.get_submodule(parent), child, own)
        leaves |= {f"{part} of {name}": getattr(own, part) for part in "ABm"}
    return model, leaves


OPTIONS = {
    **stack(12, WAYS, r=384),
    "--modes": Some(MODES),
    **COMPILED,
    "--tiny": False,
}


def check(parser, options) -> None:
    options.compiled, options.cell_seconds, options.peaks = [] if options.no_compile else ["default"], 1e6, True


def measure(run: Run) -> None:
    options = run.options
    cell = Cell("tiny" if options.tiny else "8b", options.seq, options.r)
    torch._dynamo.config.recompile_limit = 64
    ways = steps.build(cell, options, run.failed, adapted)
    steps.inputs(cell, ways, options)
    facts = {name: getattr(options, name) for name in ("layers", "seq", "dtype", "adapter", "r")}
    run.set(**facts, sizes=SIZES[cell.model], failed=run.failed)
    for way in [way for way in ("fdora", "peft_fdora") if {way, "peft_dora"} <= ways.keys()]:
        run.set(**{f"{way}_against_peft_dora": agreement(ways[way], ways["peft_dora"])})
    if "peft_fdora" in ways:
        run.set(peft_fdora_ran=paths(ways["peft_fdora"].model))
    if "fdora" in ways:
        layers = [layer for layer in ways["fdora"].model.modules() if isinstance(layer, Adapted)]
        timer = wall_timer(lambda: [layer.refresh() for layer in layers], options.device, 0)
        run.set(norms_ms=round(medians({"": timer}, options.runs)[""], 3))
    print({key: value for key, value in run.result.items() if "peft" in key or "norms" in key}, "\n", flush=True)
    rows = {}
    for found in steps.measured(run, cell, ways, None):
        facts = {"way": found["way"], "compiled": bool(found["compiled"]), "r": options.r, "dropout": options.dropout}
        row = rows.setdefault((found["way"], found["compiled"]), facts)
        row |= {f"{found['mode']}_{unit}": found[unit] for unit in ("ms", "peak_mb")}
        run.set(rows=list(rows.values()))


def judged(run: Run) -> None:
    found = {way: run.result.get(f"{way}_against_peft_dora", {}) for way in ("fdora", "peft_fdora")}
    apart = {way: {name: each["relative"] for name, each in parts.items()} for way, parts in found.items()}
    ran = {"peft_fdora": run.result["peft_fdora_ran"]} if found["peft_fdora"] else {}
    judge(apart, MOST_APART[run.options.dtype], run.failed, left(ran, run.options))


main = Suite(measure, OPTIONS, runs=7, seconds=math.inf, check=check, quick={"layers": 4, "runs": 3}, judge=judged)
