"""What a step costs through PEFT, from few tokens to many: twelve decoder layers, an optimizer step each time.

    python -m bench.steps --device cuda --json FILE
    python -m bench.steps --device cuda --cells 2048:512:16,8b:4096:64 --compiled default,reduce-overhead
    python -m bench.steps --device cuda --cells 70b-nf4:4096:64 --layers 1 --peaks
    python -m bench.steps --device cuda --cells 2048:400:16 --layers 4 --no-eager --compiled whole,whole-reduce-overhead

Layers are transformers' Qwen3 in the shape of its 8B model and of width 2048 (1.7B), frozen, bf16, all seven linears adapted;
with ``-nf4`` behind a model bitsandbytes packs them. One sequence of S tokens, loss on its last 1024. The ways share weights,
and have equal adapters, away from their start: the frozen model, PEFT's LoRA, its DoRA, that after ``use_fdora``, and after
``use_fdora(fuse=True)``. The modes:

    inference       no_grad
    step            gradient of x and all adapters, then an optimizer step
    micro           8 micro-batches and an optimizer step, for each micro-batch
    checkpointing   step, every layer checkpointed (non-reentrant; a generator's state is kept with --dropout alone)

The optimizer step is one call that changes the sign of every A: norms are new, values stay in range, and it costs the same for
every way. Wall time until the GPU is done, each step by itself; GPU time of a replayed CUDA graph ("graph"), of ``micro`` as
(an optimizer step and a gradient + 7 gradients, which find no new adapters) / 8. Where the graph of one way cannot be captured,
for all ways events around a step that is issued behind a kernel that waits ("events": too long where a step is more launches
than the queue holds, about 1000). Medians of at least five turns, each of which begins with another way; a row has their
number. Before it is timed each model is compared with PEFT's DoRA, while nothing is dropped: every way draws masks of its own.
float32 adapters run under bf16 autocast. The JSON is written after every cell.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import decoder, rivals
from bench.clock import Failures, anchor_graph, capture, free, medians, once, replay_ms
from bench.decoder import (
    LINEARS,
    MOST_APART,
    adapted_as,
    adapters,
    agreement,
    call,
    compiled_forward,
    judge,
    left,
    timed_as,
)
from bench.packed import nf4_linears
from bench.rivals import paths
from bench.suite import Run, Some, Suite, beside_lora, stack
from bench.ways import DTYPES, S
from tests.memory import peak_bytes

WAYS = ("frozen", "peft_lora", "peft_dora", "use_fdora", "use_fdora_fused")
FDORA = ("use_fdora", "use_fdora_fused")
MODES = ("inference", "step", "micro", "checkpointing")
GRAPHS = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
# Layer by layer; all layers as one graph; that for any number of tokens.
COMPILED = ("default", "reduce-overhead", "whole", "whole-reduce-overhead", "whole-max-autotune", "whole-dynamic")
MICRO = 8
LEAST = 5  # turns
WARM = 4  # calls of what is compiled, untimed
NF4 = "-nf4"  # behind a model: bitsandbytes packs its linears
SIZES = decoder.SIZES["layers"]  # of Qwen3-8B, Qwen3-1.7B, Mistral-7B, Gemma-3-4B and Llama-3.1-70B


class Cell(NamedTuple):
    model: str
    S: int
    r: int


class Stack(nn.Module):
    """Decoder layers without embedding and head."""

    def __init__(self, model: str, layers: int, dtype: torch.dtype, device: str):
        super().__init__()
        from transformers import Qwen3Config, Qwen3Model

        config = Qwen3Config(**SIZES[model], num_hidden_layers=layers, vocab_size=8, pad_token_id=None, rope_theta=1e6)
        config._attn_implementation = "sdpa"
        with torch.device(device):
            whole = Qwen3Model._from_config(config, dtype=dtype)
        self.layers, self.rotary, self.width = whole.layers, whole.rotary_emb, config.hidden_size
        self.checkpointing, self.run, self.dropout = False, nn.Module.__call__, 0.0
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        angles = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        again = {"use_reentrant": False, "preserve_rng_state": self.dropout > 0}
        for layer in self.layers:
            one = partial(self.run, layer)
            if self.checkpointing:
                x = checkpoint(one, x, position_embeddings=angles, **again)
            else:
                x = one(x, position_embeddings=angles)
        return x


def adapted(way: str, base: Stack, values: dict, dropout: float = 0.0) -> tuple[Stack, dict[str, Tensor]]:
    """A model of this way around the same weights, and its leaves."""
    if way == "frozen":
        return rivals.around_the_same_weights(base), {}
    return rivals.adapted(way, base, values, LINEARS, S, dropout=dropout)


class Way:
    """One model, and its modes on the input of :meth:`feed`."""

    def __init__(self, name: str, base: Stack, values: dict, *, dropout: float = 0.0, context=nullcontext):
        self.name, self.context = name, context
        self.model, self.leaves = adapted(name, base, values, dropout)
        self.model.dropout = dropout
        self.As = [p for leaf, p in self.leaves.items() if leaf.startswith("A")]
        self.compile("")

    def feed(self, x: Tensor, target: Tensor) -> None:
        self.x, self.target = x.detach().requires_grad_(), target

    def compile(self, mode: str) -> None:
        """As one of `COMPILED`; "" undoes it."""
        self.compiled = mode
        self.model.run = self.run = nn.Module.__call__
        if mode.startswith("whole"):
            how = mode.removeprefix("whole").lstrip("-") or "default"
            self.run = compiled_forward(self.name, "default" if how == "dynamic" else how, call, dynamic=how == "dynamic")
        elif mode:
            self.model.run = compiled_forward(self.name, mode)

    def output(self) -> Tensor:
        if self.compiled:  # its graphs want to know that what they gave before is not read any more
            torch.compiler.cudagraph_mark_step_begin()
        with self.context():
            return self.run(self.model, self.x)

    def loss(self) -> Tensor:
        last = self.output()[:, -self.target.shape[1] :]
        return (last.float() - self.target).square().mean()

    def gradient(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(), [self.x, *self.leaves.values()]))

    @torch.no_grad()
    def optimize(self) -> None:
        if self.As:
            torch._foreach_neg_(self.As)

    @torch.no_grad()
    def inference(self) -> Tensor:
        return self.output()

    def step(self) -> None:
        self.gradient()
        self.optimize()

    def first(self) -> None:
        """An optimizer step, and the micro-batch that finds new adapters; ``step`` leaves them to whoever is next."""
        self.optimize()
        self.gradient()

    def micro(self) -> None:
        total = self.gradient()
        if self.compiled.endswith(GRAPHS):  # the next replay writes there
            total = [t.clone() for t in total]
        for _ in range(MICRO - 1):
            torch._foreach_add_(total, self.gradient())
        self.optimize()

    def checkpointing(self) -> None:
        self.model.checkpointing = True
        try:
            self.step()
        finally:
            self.model.checkpointing = False


def build(cell: Cell, options, failures: Failures) -> dict[str, Way]:
    torch.manual_seed(0)
    base = Stack(cell.model.removesuffix(NF4), options.layers, DTYPES[options.dtype], options.device)
    values = adapters(base, cell.r, DTYPES[options.adapter])
    if cell.model.endswith(NF4):
        nf4_linears(base)
    return failures.attempt(options.ways, lambda name: Way(name, base, values, **adapted_as(options)))


def inputs(cell: Cell, ways: Mapping[str, Way], options) -> None:
    """The same for every way."""
    width = SIZES[cell.model.removesuffix(NF4)]["hidden_size"]
    x = torch.randn(1, cell.S, width, device=options.device).to(DTYPES[options.dtype])
    target = torch.randn(1, min(options.loss_tokens, cell.S), width, device=options.device)
    for way in ways.values():
        way.feed(x, target)


# clocks


def wall(fns: Mapping[str, Callable[[], object]], device: str, most_ms: float, runs: int) -> tuple[dict[str, float], int]:
    """Medians, and of how many turns: as many as fit into ``most_ms``, at least `LEAST` of them, at most ``runs``.

    Every turn begins with another way.
    """
    names, turns, spent = list(fns), [], 0.0
    while len(turns) < min(LEAST, runs) or (len(turns) < runs and spent * (1 + 1 / len(turns)) < most_ms):
        first = len(turns) % len(names)
        turns.append({name: once(fns[name], device) for name in names[first:] + names[:first]})
        spent += sum(turns[-1].values())
    return {name: statistics.median(turn[name] for turn in turns) for name in names}, len(turns)


def behind_a_wait(fn: Callable[[], object], issue_ms: float) -> float:
    """GPU ms between events around one call, issued while a kernel waits for as long as that takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2.5e6 * issue_ms))  # cycles
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


class Gpu:
    """GPU ms of the ways, and how they were taken: by graphs, or all by events where one of them cannot be captured.

    Graphs share one memory pool: none of their results is read again.
    """

    def __init__(self, graphs: bool):
        self.graphs, self.anchor = graphs, anchor_graph()

    def times(
        self,
        fns: Mapping[str, Callable[[], object]],
        wall_ms: Mapping[str, float],
        runs: int,
        failures: Failures,
        label: str = "{}",
    ) -> tuple[dict[str, float], str]:
        able = fns if self.graphs else ()
        graphs = failures.attempt(able, lambda name: capture(fns[name], 1, self.anchor), f"capture of {label}")
        if len(graphs) == len(fns):
            return medians({name: partial(replay_ms, graph) for name, graph in graphs.items()}, runs), "graph"
        graphs.clear()
        torch.cuda.synchronize()
        return medians({name: partial(behind_a_wait, fn, wall_ms[name]) for name, fn in fns.items()}, runs), "events"


# one cell


def warm(step: Callable[[], object], compiled: str, device: str) -> float:
    """Once; what is compiled `WARM` times: the first call compiles, the next ones record graphs, later ones replay them.

    Returns ms of the first.
    """
    first = once(step, device)
    for _ in range(WARM - 1 if compiled else 0):
        step()
    return first


def measure(cell: Cell, ways: dict[str, Way], mode: str, gpu: Gpu | None, options, failures: Failures) -> list[dict]:
    """A row for each way; ``mode`` may be "compiled:..."."""
    compiled, _, plain = mode.rpartition(":")
    label = f"{{}}, {cell.model}, S {cell.S}, r {cell.r}, {mode}"
    able = {name: getattr(way, plain) for name, way in ways.items()}
    warmed = failures.attempt(
        able, lambda name: warm(ways[name].step if plain == "micro" else able[name], compiled, options.device), label
    )
    share, many = MICRO if plain == "micro" else 1, 1e3 * options.cell_seconds / len(options.modes) / 2
    peaks = {}
    if options.peaks:
        peaks = failures.attempt(warmed, lambda name: peak_bytes(able[name], options.device) / 2**20, label)
        free(options.device)  # what a way that ran out of memory has left
    able = {name: able[name] for name in (peaks if options.peaks else warmed)}
    if not able:
        return []
    ms, turns = wall(able, options.device, many, options.runs)
    gpu_ms, gpu_by = {}, ""
    if gpu:
        runs = min(options.runs, max(LEAST, int(many / sum(ms.values()))))
        if plain == "micro":
            parts = {f"{part}, {name}": (name, part) for part in ("first", "gradient") for name in able}
            fns = {key: getattr(ways[name], part) for key, (name, part) in parts.items()}
            issue = {key: ms[name] / share for key, (name, _) in parts.items()}
            found, gpu_by = gpu.times(fns, issue, runs, failures, label)
            gpu_ms = {name: (found[f"first, {name}"] + (MICRO - 1) * found[f"gradient, {name}"]) / MICRO for name in able}
        else:
            gpu_ms, gpu_by = gpu.times(able, ms, runs, failures, label)
    rows = []
    for name in able:
        row = {**cell._asdict(), "dropout": options.dropout, "mode": plain, "compiled": compiled, "way": name}
        row |= {"ms": round(ms[name] / share, 3), "first_ms": round(warmed[name], 1), "turns": turns}
        row |= {"gpu_ms": round(gpu_ms[name], 3), "gpu_by": gpu_by} if name in gpu_ms else {}
        rows.append(row | ({"peak_mb": round(peaks[name], 2)} if peaks else {}))
    return rows


def cells(text: str) -> list[Cell]:
    """``MODEL:S:r``, comma separated; a part that is empty is any."""
    found = []
    for part in text.split(","):
        model, tokens, r = (*part.split(":"), "", "")[:3]
        every = model or "8b,2048", tokens or "128,512,2048,4096", r or "16,64"
        found += [Cell(m, int(t), int(k)) for m, t, k in product(*(each.split(",") for each in every))]
    if unknown := {cell.model.removesuffix(NF4) for cell in found} - set(SIZES):
        raise argparse.ArgumentTypeError(f"unknown models {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    return list(dict.fromkeys(found))


OPTIONS = {
    **stack(12, WAYS, seq=None),
    "--cells": dict(type=cells, default=cells(""), help="MODEL:S:r, comma separated; empty parts are any"),
    "--modes": Some(MODES),
    "--compiled": (Some(COMPILED, []), "also compiled, per layer, or the whole stack at once"),
    "--no-eager": False,
    "--peaks": (False, "peak memory above weights and adapters, too"),
    "--cell-seconds": (6.0, "fewer turns where a cell would take longer"),
}


def compared(ways: dict[str, Way], theirs: str = "peft_dora") -> dict[str, dict]:
    """fdora against PEFT's DoRA, and which path its calls took."""
    if theirs not in ways:
        return {}
    mine = {name: way for name, way in ways.items() if "fdora" in name}
    return {n: {"apart": agreement(way, ways[theirs]), "paths": paths(way.model)} for n, way in mine.items()}


def agreed(run: Run, cell: Cell, ways: dict[str, Way]) -> None:
    key = f"{cell.model}, S {cell.S}, r {cell.r}"
    found = run.failed.attempt([f"agreement, {key}"], lambda _: compared(ways))
    run.result.setdefault("agreement", {})[key] = next(iter(found.values()), {})
    print(key, "against PEFT's DoRA:", run.result["agreement"][key], flush=True)


def measured(run: Run, cell: Cell, ways: dict[str, Way], gpu: Gpu | None) -> Iterator[dict]:
    """The rows of a cell: eager, and compiled in each way that is asked for."""
    options = run.options
    for compiled in ([] if options.no_eager else [""]) + options.compiled:
        if compiled:
            torch._dynamo.reset()
        for way in ways.values():
            way.compile(compiled)
        for mode in options.modes:
            if mode == "checkpointing" and compiled and not compiled.startswith("whole"):
                continue
            if run.late({**cell._asdict(), "mode": f"{compiled}:{mode}"}):
                continue
            # what draws again, from a generator's state, no graph can read; nor what is recorded already
            events = compiled.endswith(GRAPHS) or (mode == "checkpointing" and options.dropout)
            clock = Gpu(False) if gpu and events else gpu
            with timed_as(mode, options.dropout, [way.model for way in ways.values()]):
                yield from measure(cell, ways, f"{compiled}:{mode}", clock, options, run.failed)
    for way in ways.values():
        way.compile("")


def measure_all(run: Run) -> None:
    options = run.options
    torch._dynamo.config.recompile_limit = 64
    run.set("layers", "dtype", "adapter", "cell_seconds", micro_batches=MICRO, agreement={}, failed=run.failed)
    gpu = None if options.device == "cpu" else Gpu(True)
    ways = {}
    built = None
    for cell in run.cases(sorted(options.cells, key=lambda cell: (cell.model, cell.r, cell.S))):
        new = built != (cell.model, cell.r)
        if new:
            ways.clear()
            free(options.device)
            ways, built = build(cell, options, run.failed), (cell.model, cell.r)
        inputs(cell, ways, options)
        if new:
            agreed(run, cell, ways)
        for row in measured(run, cell, ways, gpu):
            run.add(row)
    run.set(seconds=round(time.perf_counter() - run.start, 1))


def judged(run: Run) -> None:
    found = {f"{name}, {at}": each for at, ways in run.result["agreement"].items() for name, each in ways.items()}
    apart, ran = ({name: each[key] for name, each in found.items()} for key in ("apart", "paths"))
    judge(apart, MOST_APART[run.options.dtype], run.failed, left(ran, run.options))


main = Suite(measure_all, OPTIONS, runs=9, seconds=math.inf, show=beside_lora, judge=judged)
