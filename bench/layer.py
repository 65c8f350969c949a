"""One adapted linear against its rivals: frozen, bare products, LoRA and DoRA of PEFT and others, the paper's form.

    python -m bench.layer --device cuda --quick --json FILE
    python -m bench.layer --device cuda --draw 64 --cold --jobs 8 --ways bare,peft_lora,fdora,fdora_inside --json FILE
    python -m bench.layer --device cuda --shapes llama8b,qwen8b --M 4096 --r 16,384 --adapter bf16,fp32 --json FILE

bf16 x and W. GPU time by CUDA graph (wall time on a CPU), ways in turns in one run, medians. ``fwd`` runs under no_grad,
``fwd_bwd`` takes gradients of x and the adapters. Every way is compared with float64 before it is timed; one that cannot run
is listed with its reason, a wrong rival with its error, and a wrong fdora fails the command at its end. The JSON is rewritten
after every case.

Which row a way stands in: what has no norm, or computes it in every call and knows no other way, in the rows of both norms.
``peft_dora_cached`` and ``axolotl_dora`` keep the norm from call to call, as ``fdora`` does where it is given, so they stand
in the rows of a given norm alone. Axolotl's goes stale when A or B are written: ``axolotl_dora_inside``, which computes it in
every call, stands for a step of training in the rows of a norm inside. ``peft_dora_cached`` is for inference and has no
``fwd_bwd``. LoRA computes less than DoRA: fdora's time over LoRA's is a price, a DoRA's over fdora's a gain. ``fdora_full`` is
``detach=False``: gradients go through the norm, given or computed inside.

``--base``: W in 4 bits. NF4 is with nested scales as bitsandbytes packs it: ``linear4bit`` is its frozen layer, PEFT, Axolotl
and Unsloth adapt that, and fdora takes its codes; ``frozen`` is x W^T of the decoded W, and so is float64's truth. Codes of HQQ
in groups of 64, of GPTQ and AWQ of 128 are for fdora alone.

``factored`` is our writing of the paper's data flow, ``dorafactors`` its own code. That and the code of Axolotl, Unsloth and
LoRAFusion come from ``--rival-path`` (which files: bench/rivals.py, bench/checkouts.py) or, but for the paper's, from an
installed package. float32 adapters are cast to bf16 in every call there, which all but LoRAFusion do themselves.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain, product
from statistics import geometric_mean

import torch

from bench.checkouts import RIVAL_PATH
from bench.clock import free, medians_of
from bench.packed import BASES, Packed
from bench.records import grouped
from bench.shapes import copies_of, draw
from bench.suite import Some, Suite, summed
from bench.ways import (
    DORA,
    DTYPES,
    FULL,
    KEEP_NORM,
    LORA,
    WAYS,
    Inputs,
    against,
    build,
    by_mode,
    checked,
    in_turns,
    opponent,
    ratios,
    truths,
    warm,
)

MODELS = {  # K x N of q/o, k/v, gate/up, down
    "llama8b": ("4096x4096", "4096x1024", "4096x14336", "14336x4096"),
    "qwen8b": ("4096x4096", "4096x1024", "4096x12288", "12288x4096"),
    "qwen32b": ("5120x5120", "5120x1024", "5120x27648", "27648x5120"),
    "llama70b": ("8192x8192", "8192x1024", "8192x28672", "28672x8192"),
}
QUICK = (
    *(("4096x4096", 4096, 16), ("4096x4096", 4096, 384), ("4096x1024", 4096, 64), ("4096x14336", 4096, 64)),
    *(("14336x4096", 4096, 64), ("8192x8192", 4096, 384), ("5120x27648", 4096, 16), ("28672x8192", 4096, 128)),
    *(("4096x4096", 16384, 16), ("4096x14336", 16384, 128), ("4096x4096", 16, 16), ("4096x14336", 16, 64)),
)
TOLERANCE = 5e-3  # relative L2; one rounding to bf16 is 1.7e-3, and at most three follow one another


def case(M: int, K: int, N: int, r: int, adapter: str, base: str, options) -> list[dict]:
    """Four rows: forward or both directions, norm given or computed inside."""
    device = options.device
    torch._dynamo.reset()
    i = Inputs.random(M, K, N, r, DTYPES[adapter], device)
    W, sets = i.W, copies_of(i) if options.cold else [i]
    makers = [partial(build, i=each) for each in sets]
    if base != "bf16":
        packed = [Packed(base, each) for each in sets]
        i, W, makers = packed[0].i, packed[0].codes.dequantize(torch.float32), [each.way for each in packed]
    how = {"rival_path": options.rival_path, "autocast": options.peft_autocast}
    ways, error, failed, peak, _ = checked(
        options.ways,
        lambda name: in_turns([make(name, **how) for make in makers]),
        against(truths(i, W)),
        TOLERANCE,
        device,
        peaks=options.ways,
    )
    rows = []
    free(device)
    for direction, fns in by_mode(ways):
        ms = medians_of(fns, device, options.runs, failed)
        for norm in ("given", "inside"):
            row = {"M": M, "K": K, "N": N, "r": r, "adapter": adapter, "base": base, "mode": direction, "norm": norm}
            row |= {"ms": select(ms, norm), "peak_mb": select(peak, norm), "error": select(error, norm)}
            row |= {"ratio": ratios(row["ms"], pairs()), "failed": select(failed, norm)}
            rows.append(row)
    return rows


def select(by_way: dict, norm: str) -> dict:
    """Of the ways that keep the norm or compute it, as asked, only those of this norm, under the plain name."""
    mine = {}
    for name, value in by_way.items():
        plain = name.replace("_inside", "")
        if plain not in KEEP_NORM or ("inside" in name) == (norm == "inside"):
            mine[plain] = round(value, 5) if isinstance(value, float) else value
    return mine


def pairs() -> list[tuple[str, str]]:
    """fdora over the floors (small is good), rivals over fdora (large is good)."""
    found = [("fdora", floor) for floor in ("frozen", "bare", "linear4bit", *LORA)]
    found += [(rival, "fdora") for rival in (*DORA, "fdora_full", "fdora_compiled")] + [
        ("fdora_compiled", "peft_lora_compiled")
    ]
    found += [(rival, opponent(rival)) for rival in DORA if opponent(rival) != "fdora"]
    return found


def summarize(rows: list[dict]) -> dict:
    means, worst = {}, {}
    for (mode, norm), same in grouped(rows, "mode", "norm").items():
        values = {}
        for pair, ratio in chain.from_iterable(row["ratio"].items() for row in same):
            values.setdefault(pair, []).append(ratio)
        means[f"{mode}, norm {norm}"] = {pair: round(geometric_mean(each), 3) for pair, each in values.items()}
        worst[f"{mode}, norm {norm}"] = {pair: max(each) for pair, each in values.items()}
    failed = sorted({f"{name}: {reason}" for row in rows for name, reason in row["failed"].items()})
    summary = {"geometric_means": means, "worst": worst, "failed": failed, "wrong": wrong(rows)}
    return summary | {"cases": len(rows) // 4}  # of `case`


def wrong(rows: list[dict]) -> list[str]:
    """Ways beyond the tolerance, with the worst error of each kind."""
    worst = {}
    for row in rows:
        for name, found in row["error"].items():
            for key, error in found.items():
                if not error <= TOLERANCE:
                    worst.setdefault((name, key), []).append(error)
    return [f"{name}: {key} by {max(each):.1e}" for (name, key), each in worst.items()]


def cases(options) -> list[tuple]:
    if options.quick:
        picked = QUICK
    elif options.draw:
        picked = [(f"{K}x{N}", M, r) for M, K, N, r in draw(options.seed, options.draw)]
    else:
        names = MODELS if options.shapes == ["all"] else options.shapes
        shapes = dict.fromkeys(shape for name in names for shape in MODELS.get(name, (name,)))
        picked = product(shapes, options.M, options.r)
    return [(M, *map(int, shape.split("x")), r, a, b) for shape, M, r in picked for a in options.adapter for b in options.base]


OPTIONS = {
    "--shapes": (["llama8b"], f"of {', '.join(MODELS)}, all, or KxN"),
    "--M": [4096],
    "--r": [16, 64, 384],
    "--adapter": Some(DTYPES, ["bf16"]),
    "--quick": (False, "12 cases instead of --shapes, --M and --r"),
    "--draw": (0, "so many shapes at random instead, of any M and r: no table and no fit has seen them"),
    "--seed": (16, "of these"),
    "--cold": (False, "each way on several weights in turn, which no cache holds"),
    "--base": (Some(BASES, ["bf16"]), "of W"),
    "--ways": Some((*WAYS, *FULL, "linear4bit"), WAYS),
    **RIVAL_PATH,
    "--peft-autocast": (False, "PEFT's layers under bf16 autocast, as trainers run them"),
}


def measure(run):
    for each in run.cases(cases(run.options)):
        run.add(*case(*each, run.options))
        run.set(summary=summarize(run.result["rows"]) | {"skipped": []})
        free(run.options.device)
    run.set(summary=summarize(run.result["rows"]) | {"skipped": run.result["skipped"]})
    for each in run.result["summary"]["wrong"]:
        print(f"\nwrong: {each}")
    run.end("fdora")


def compile_case(M: int, K: int, N: int, r: int, adapter: str, name: str) -> None:
    warm(build(name, Inputs.random(M, K, N, r, DTYPES[adapter], "cuda")))


def ahead(options):
    mine = [name for name in options.ways if name.startswith("fdora")]
    return compile_case, [(*each[:5], name) for each in cases(options) for name in mine]


main = Suite(measure, OPTIONS, runs=9, seconds=math.inf, ahead=ahead, show=summed)
