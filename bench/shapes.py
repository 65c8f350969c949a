"""One adapted linear on shapes drawn at random: no table and no fit has seen them.

    python -m bench.shapes --device cuda --seed 16 --shapes 64 --json FILE

GPU time by CUDA graph, bf16, ways in turns, medians. Every way has several sets of inputs and weights where one would stay in
the cache of the GPU. ``fdora`` is given its norm, ``fdora_inside`` computes it; of 8 micro-batches of a step one computes it,
``micro_batches`` is their mean. ``bare`` is the eight matrix products alone, three of them forward. ``fdora_dz``, where it is
asked for, writes dz in backward where ``fdora`` may scale W. Every fdora is compared with float64 first, and a wrong
one fails the command.
"""

from __future__ import annotations

import gc
import itertools
import math
from dataclasses import fields
from functools import partial
from random import Random
from statistics import geometric_mean

import torch

from bench import suite
from bench.clock import anchor_graph, free, launches_of, medians, once, quick_timer
from bench.layer import TOLERANCE
from bench.suite import Some, Suite, numbers
from bench.table import table
from bench.ways import BF16, Inputs, against, build, checked, truths, warm

WAYS = ("bare", "peft_lora", "fdora", "fdora_inside")
MICRO_BATCHES = 8
CACHE = 2**28  # bytes: several times what any GPU keeps

# K x N of linears: Qwen3 0.6B to 32B, Llama 1B to 70B, Gemma 3, Phi 4, Mistral, ViT-g/14
MODELS = suite.shapes(
    "1024x3072,3072x1024,2048x1024,1024x2048,2048x6144,6144x2048,2048x2048,2560x9728,9728x2560,2560x4096,4096x2560,2560x1024,"
    "4096x4096,4096x1024,4096x12288,12288x4096,4096x14336,14336x4096,5120x5120,5120x1024,5120x25600,25600x5120,2048x8192,"
    "8192x2048,3072x8192,8192x3072,8192x8192,8192x1024,8192x28672,28672x8192,3840x15360,15360x3840,5120x17920,17920x5120,"
    "1536x4608,1536x6144,1536x1536,5120x7680,1152x4304,768x3072,3072x768,1280x5120,5120x1280,4096x11008"
)
RANKS = (4, 8, 12, 16, 16, 24, 32, 32, 48, 64, 64, 96, 128, 192, 256, 384, 512)
MOST = 2**28  # elements of W: no published layer has more


def draw(seed: int, count: int) -> list[tuple[int, int, int, int]]:
    """(M, K, N, r): 64 to 8192 tokens, half of them no multiple of anything; half of the weights are of models."""
    random, shapes = Random(seed), []
    while len(shapes) < count:
        M = round(math.exp(random.uniform(math.log(64), math.log(8192))))
        M = M if random.random() < 0.5 else max(64, M // 64 * 64)
        K, N = (128 * round(math.exp(random.uniform(math.log(6), math.log(224)))) for _ in range(2))
        K, N = random.choice(MODELS) if random.random() < 0.5 else (K, N)
        shape = (M, K, N, random.choice(RANKS))
        if K * N <= MOST and shape not in shapes:
            shapes.append(shape)
    return shapes


def compile_case(name: str, *shape: int) -> None:
    warm(build(name, Inputs.random(*shape, BF16, "cuda")))


def copied(i: Inputs) -> Inputs:
    each = {f.name: getattr(i, f.name) for f in fields(i)}
    return Inputs(**{name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in each.items()})


def case(shape: tuple[int, int, int, int], where: tuple, options) -> list[dict]:
    """``where``: what quick_timer captures into; empty on a CPU."""
    M, K, N, _ = shape
    sets = max(1, min(8, CACHE // (2 * (M * K + K * N + 2 * M * N)))) if where else 1
    i = Inputs.random(*shape, BF16, options.device)
    first, _, failed, *_ = checked(
        options.ways, lambda name: build(name, i), against(truths(i, i.W)), TOLERANCE, options.device
    )
    others = [copied(i) for _ in range(sets - 1)]
    ways = {name: [way, *(build(name, each) for each in others)] for name, way in first.items()}
    rows = []
    for mode in ("fwd", "fwd_bwd"):

        def turns(name, mode=mode):
            fns = itertools.cycle([way.forward if mode == "fwd" else way.both for way in ways[name]])
            return lambda: next(fns)()

        about_ms = (1 if mode == "fwd" else 3) * (0.02 + 2e-9 * M * K * N / 600)
        launches = launches_of(about_ms, sets)

        def timer(name, turns=turns, launches=launches):
            return quick_timer(turns(name), launches, *where) if where else partial(once, turns(name), "cpu")

        ms = medians(failed.attempt(ways, timer), options.runs)
        if "fdora_inside" in ms:
            ms["micro_batches"] = ((MICRO_BATCHES - 1) * ms["fdora"] + ms["fdora_inside"]) / MICRO_BATCHES
        rows.append({"shape": shape, "mode": mode, "ms": {name: round(t, 5) for name, t in ms.items()}, "failed": failed})
    return rows


PAIRS = (
    *(("fdora", "bare"), ("fdora", "peft_lora"), ("micro_batches", "peft_lora"), ("peft_lora", "bare")),
    *(("fdora", "fdora_dz"), ("fdora_dz", "bare")),
)


def summarize(rows: list[dict]) -> dict:
    """For each mode and pair: the geometric mean, the worst and its shape."""
    summary = {}
    for mode, (a, b) in itertools.product(("fwd", "fwd_bwd"), PAIRS):
        ratios = [(row["ms"][a] / row["ms"][b], row["shape"]) for row in rows if row["mode"] == mode and {a, b} <= {*row["ms"]}]
        if ratios:
            mean = geometric_mean(ratio for ratio, _ in ratios)
            worst, where = max(ratios)
            summary[f"{mode}: {a}/{b}"] = {"mean": round(mean, 3), "worst": round(worst, 3), "at": where, "cases": len(ratios)}
    return summary


OPTIONS = {
    "--seed": 16,
    "--shapes": 64,
    "--shape": dict(type=numbers, action="append", help="M,K,N,r in the place of those drawn"),
    "--ways": Some((*WAYS, "fdora_dz"), WAYS),
}


def shapes(options):
    return [tuple(shape) for shape in options.shape or ()] or draw(options.seed, options.shapes)


def ahead(options):
    mine = [name for name in options.ways if name.startswith("fdora")]
    return compile_case, [(name, *shape) for shape in shapes(options) for name in mine]


def measure(run):
    options = run.options
    where = () if options.device == "cpu" else (anchor_graph(), torch.cuda.Stream())
    for number, shape in enumerate(run.cases(shapes(options))):
        run.add(*case(shape, where, options))
        run.set(summary=summarize(run.result["rows"]))
        if not number:  # what is imported stays: nothing to search for garbage
            gc.freeze()
        free(options.device)
    gc.unfreeze()
    lines = [[name, *found.values()] for name, found in summarize(run.result["rows"]).items()]
    print(table(["ratio", "mean", "worst", "at", "cases"], lines))
    run.end("fdora")


main = Suite(measure, OPTIONS, runs=5, seconds=math.inf, ahead=ahead)
