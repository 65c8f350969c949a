"""A language model on several GPUs: PEFT's LoRA, its DoRA, and that after ``use_fdora``, in one run.

    python -m bench.sharded --world 2 --device cuda --json FILE
    python -m bench.sharded --world 2 --device cuda --layout tp
    python -m bench.sharded --world 2 --tiny --layers 2 --seq 16 --loss-tokens 4 --r 4 --runs 1     # gloo, CPU

Starts one process per GPU (NCCL; gloo without GPUs). Architecture, adapters and ways are bench.model's. FSDP2: each decoder
layer is a unit, every rank has a sequence of its own. ``--layout tp``: torch's parallelize_module cuts q, k, v, gate and up by
rows, o and down by columns, and of each adapter what plain LoRA's has cut (``rows``, ``columns``: these alone); every rank has
the same sequence; PEFT's DoRA raises there. ``--layout zero2`` and ``zero3``: DeepSpeed's engine, on the same sequence as well.
A step: forward, backward, fused AdamW; also with gradient checkpointing, and of 4 micro-batches, which share their norms. Wall
time from one barrier until every rank's GPU is done, median of turns; what the host takes to issue forward, backward and the
optimizer's step, nothing waited for in between; peak memory above what is there between steps. On a GPU a profile of one step
sums the kernels of all norms, the collectives, and the busiest of the rest.
Before anything is timed, loss and averaged gradients are compared with those of PEFT's DoRA (of whole weights, for tensor
parallelism), while nothing is dropped: every way draws masks of its own; the collectives of a step are counted. Ways with
``_shards`` compute norms on the shards (``norms_on_shards=True``); their collectives are not among those counted.
float32 adapters run under bf16 autocast.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter

import torch
import torch.distributed as dist

from bench.clock import free
from bench.decoder import DTYPES, MOST_APART, adapters, apart, left
from bench.kernels import by_name, profiled
from bench.model import ARCHITECTURES, WAYS, network
from bench.processes import timed
from bench.rivals import paths
from bench.sharded_run import LAYOUTS, ZERO, Collectives, Sharded, truth
from bench.suite import One, Run, Some, Suite, stack
from tests.memory import peak_bytes

EVERY = (*WAYS, "peft_fdora_shards", "peft_fdora_fused_shards")
MODES = ("step", "step_checkpointing", "step_4")
PARTS = ("forward", "backward", "optimizer")
NORMS = ("norm_kernel", "choose_kernel", "norms_kernel", "fingerprint", "roots_kernel")


def profile(step) -> dict:
    """GPU ms of one step by kind, and the busiest kernels."""
    step()
    kernels = profiled(step)
    moved = [k for k in kernels if "nccl" in k.name.lower()]
    own = [k for k in kernels if k not in moved]
    count, found = Counter(k.name for k in kernels), {"launches": len(kernels)}
    norms = [k for k in kernels if any(name in k.name for name in NORMS)]
    for name, some in {"norms": norms, "nccl": moved}.items():
        found[f"{name}_launches"] = len(some)
    for name, some in {"all": own, "norms": norms, "nccl": moved}.items():
        found[f"{name}_ms"] = round(sum(k.us for k in some) / 1e3, 3)
    return found | {"busiest": [(name[:80], count[name], round(ms, 3)) for name, ms in by_name(own, 1e3)[:16]]}


def micro(run: Sharded, mode: str):
    step = run.of(mode.replace("step_4", "step"))  # sets checkpointing
    return (lambda: run.step(4)) if mode.startswith("step_4") else step


def measure(run: Run) -> None:
    options, failures, result = run.options, run.failed, run.result
    mesh = dist.init_device_mesh(options.device, (options.world,))
    torch.manual_seed(0)
    base = network(options, options.layers)
    values = adapters(base, options.r, DTYPES[options.adapter])
    draw = torch.Generator().manual_seed(1 + run.rank * (options.layout == "fsdp"))
    tokens = torch.randint(base.lm_head.out_features - 1, (1, options.seq), generator=draw)
    inputs = {"input_ids": tokens.to(base.lm_head.weight.device)}
    exact = None if options.layout == "fsdp" else truth(base, values, inputs, options)
    ways = failures.attempt(options.ways, lambda way: Sharded(way, copy.deepcopy(base), values, inputs, options, mesh))
    base = None
    free(options.device)
    names = ("world", "model", "layers", "seq", "layout", "r", "adapter", "dropout", "compiled")
    run.set(**{name: getattr(options, name) for name in names}, failed=failures)
    run.set(agreement={}, collectives={}, paths={}, profiles={})
    if exact is None and "peft_dora" in ways:
        exact = ways["peft_dora"].gradients_of_all()
    for way in [way for way in ways if exact and "fdora" in way]:
        mine = ways[way].gradients_of_all()
        result["agreement"][way] = {name: apart(mine[name], exact[name])["relative"] for name in exact}
    exact = None
    run.say("agreement", result["agreement"])
    for mode in options.modes:
        run.add(*rows_of(ways, mode, options, failures))
    for way, each in ways.items():  # last: compiled code would run as it is written from here on
        each.of("step")
        with Collectives() as collectives:
            each.step(1)
        result["collectives"][way] = dict(collectives.counts)
    if options.device == "cuda" and not options.no_profile:
        result["profiles"] = {way: profile(micro(each, "step")) for way, each in ways.items()}
    run.set(paths={way: paths(each.model) for way, each in ways.items() if "fdora" in way})
    run.say({name: result[name] for name in ("collectives", "profiles", "paths", "failed")})


def rows_of(ways: dict[str, Sharded], mode: str, options, failures) -> list[dict]:
    device = options.device
    peaks = failures.attempt(ways, lambda way: peak_bytes(micro(ways[way], mode), device) / 2**20)
    turns, issues = {way: [] for way in peaks}, {way: [] for way in peaks}
    for turn in range(options.runs + 2):
        for way in peaks:
            ms, parts = timed(micro(ways[way], mode), device), ways[way].issue(device)
            if turn > 1:
                turns[way].append(ms)
                issues[way].append(parts)
    lora, rows = statistics.median(turns["peft_lora"]) if "peft_lora" in turns else None, []
    for way in peaks:
        ms = statistics.median(turns[way])
        issue = {part: round(statistics.median(each[i] for each in issues[way]), 3) for i, part in enumerate(PARTS)}
        row = {"way": way, "mode": mode, "dropout": options.dropout, "ms": round(ms, 3), "peak_mb": round(peaks[way], 1)}
        row["issue_ms"] = issue
        rows.append(row | {"least_ms": round(min(turns[way]), 3)} | ({"of_lora": round(ms / lora, 4)} if lora else {}))
    return rows


def judge(run: Run) -> None:
    result, options, failures = run.result, run.options, run.failed
    wrong = [way for way, found in result["agreement"].items() if not max(found.values()) <= MOST_APART[options.dtype]]
    stock = [] if options.compiled else list(left(result["paths"], options, {"fused"}))
    if wrong or stock or failures:
        raise SystemExit(f"apart from PEFT's DoRA: {wrong}; not all fused: {stock}; failed: {dict(failures)}")


OPTIONS = {
    **stack(6, EVERY),
    "--layout": (One(LAYOUTS, "fsdp"), "tensor parallel: tp, or rows or columns alone; zero2, zero3: DeepSpeed"),
    "--model": One([m for m in ARCHITECTURES if "vl" not in m], "llama-3.1-8b"),
    "--modes": Some(MODES),
    "--compiled": (False, "torch.compile of each decoder layer"),
    "--tiny": False,
    "--no-profile": False,
}


def check(parser, options) -> None:
    options.sweep = None
    if options.layout != "fsdp" and options.ways == list(EVERY):
        options.ways = ["peft_lora", "peft_fdora"]
    if options.layout in ZERO and (options.compiled or "step_4" in options.modes):
        parser.error("ZeRO's engine takes steps of one micro-batch, and is not compiled: --modes step,step_checkpointing")
    if options.runs < 1 or options.seq < 2:
        parser.error("--runs and --seq must be at least 1 and 2")


main = Suite(__doc__, measure, OPTIONS, runs=9, world=2, check=check, judge=judge)
parse = main.parse


if __name__ == "__main__":
    main()
