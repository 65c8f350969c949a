"""A language model on several GPUs: PEFT's LoRA, its DoRA, and that after ``use_fdora``, in one run.

    python -m bench.sharded --world 2 --device cuda --json FILE
    python -m bench.sharded --world 2 --device cuda --layout tp
    python -m bench.sharded --world 2 --tiny --layers 2 --seq 16 --loss-tokens 4 --r 4 --runs 1     # gloo, CPU

Starts one process per GPU (NCCL; gloo without GPUs). Architecture, adapters and ways are bench.model's. FSDP2: each decoder
layer is a unit, every rank has a sequence of its own. ``--layout tp``: torch's parallelize_module cuts q, k, v, gate and up by
rows, o and down by columns, and of each adapter what plain LoRA's has cut (``rows``, ``columns``: these alone); every rank has
the same sequence; PEFT's DoRA raises there. A step: forward, backward, fused AdamW; also with gradient checkpointing, and of 4
micro-batches, which share their norms. Wall time from one barrier until every rank's GPU is done, median of turns; what the
host takes to issue forward, backward and the optimizer's step, nothing waited for in between; peak memory above what is there
between steps. On a GPU a profile of one step sums the kernels of all norms, the collectives, and the busiest of the rest.
Before anything is timed, loss and averaged gradients are compared with those of PEFT's DoRA (of whole weights, for tensor
parallelism); the collectives of a step are counted. Ways that end in ``_shards`` compute norms on the shards
(``norms_on_shards=True``); their collectives are not among those counted.
"""

from __future__ import annotations

import copy
import json
import statistics
import time

import torch
import torch.distributed as dist

from bench.attempt import Failures
from bench.clock import free, synchronize
from bench.layers12 import DTYPES, MOST_APART, adapters, apart
from bench.model import ARCHITECTURES, WAYS, network
from bench.processes import run_in_processes
from bench.records import save
from bench.rivals import paths
from bench.sharded_run import LAYOUTS, Collectives, Sharded, truth
from bench.suite import about, command
from bench.table import table
from tests.memory import peak_bytes

MODES = ("step", "step_checkpointing", "step_4")
PARTS = ("forward", "backward", "optimizer")
NORMS = ("norm_kernel", "choose_kernel", "norms_kernel", "fingerprint", "roots_kernel")


def timed(step, device: str) -> float:
    """Wall ms until every rank is done."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def profile(step) -> dict:
    """GPU ms of one step by kind, and the busiest kernels."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = [(e.key, e.count, e.self_device_time_total / 1e3) for e in profiled.key_averages() if e.self_device_time_total]
    norms = [k for k in kernels if any(name in k[0] for name in NORMS)]
    moved = [k for k in kernels if "nccl" in k[0].lower()]
    busiest = sorted((k for k in kernels if k not in moved), key=lambda k: -k[2])[:16]
    return {
        "all_ms": round(sum(k[2] for k in kernels if k not in moved), 3),
        "launches": sum(k[1] for k in kernels),
        "norms_ms": round(sum(k[2] for k in norms), 3),
        "norms_launches": sum(k[1] for k in norms),
        "nccl_ms": round(sum(k[2] for k in moved), 3),
        "nccl_launches": sum(k[1] for k in moved),
        "busiest": [(name[:80], count, round(ms, 3)) for name, count, ms in busiest],
    }


def micro(run: Sharded, mode: str):
    step = run.of(mode.replace("step_4", "step"))  # sets checkpointing
    return (lambda: run.step(4)) if mode.startswith("step_4") else step


def worker(rank: int, options) -> None:
    device = f"cuda:{rank}" if options.device == "cuda" else "cpu"
    mesh = dist.init_device_mesh(options.device, (options.world,))
    facts, failures = about(options.device, options.commit, None), Failures()
    torch.manual_seed(0)
    base = network(options, options.layers)
    values = adapters(base, options.r, DTYPES[options.adapter])
    draw = torch.Generator().manual_seed(1 + rank * (options.layout == "fsdp"))
    inputs = {"input_ids": torch.randint(base.lm_head.out_features - 1, (1, options.seq), generator=draw).to(device)}
    exact = None if options.layout == "fsdp" else truth(base, values, inputs, options)
    runs = failures.attempt(options.ways, lambda way: Sharded(way, copy.deepcopy(base), values, inputs, options, mesh))
    base = None
    free(options.device)
    result = {"about": facts, "world": options.world, "model": options.model, "layers": options.layers, "seq": options.seq}
    result |= {"layout": options.layout, "r": options.r, "adapter": options.adapter, "compiled": options.compiled}
    result |= {
        "runs": options.runs,
        "rows": [],
        "agreement": {},
        "collectives": {},
        "paths": {},
        "profiles": {},
        "failed": failures,
    }
    if exact is None and "peft_dora" in runs:
        exact = runs["peft_dora"].gradients_of_all()
    if exact is not None:
        for way in [way for way in runs if "fdora" in way]:
            mine = runs[way].gradients_of_all()
            result["agreement"][way] = {name: apart(mine[name], exact[name])["relative"] for name in exact}
    exact = None
    show(rank, {key: result[key] for key in ("about", "agreement")})
    for mode in options.modes:
        measure(rank, runs, mode, options, result, failures)
    for way, run in runs.items():  # last: compiled code would run as it is written from here on
        run.of("step")
        with Collectives() as collectives:
            run.step(1)
        result["collectives"][way] = dict(collectives.counts)
    show(rank, {"collectives": result["collectives"]})
    if options.device == "cuda" and not options.no_profile:
        for way, run in runs.items():
            result["profiles"][way] = profile(micro(run, "step"))
            show(rank, {way: result["profiles"][way]})
    result["paths"] = {way: paths(run.model) for way, run in runs.items() if "fdora" in way}
    show(rank, {"calls": result["paths"], "failed": failures})
    if rank == 0:
        save(options.json, result)
    wrong = [way for way, found in result["agreement"].items() if not max(found.values()) <= MOST_APART[options.dtype]]
    stock = [way for way, found in result["paths"].items() if not options.compiled and set(found) != {"fused"}]
    if rank == 0 and (wrong or stock or failures):
        raise SystemExit(f"apart from PEFT's DoRA: {wrong}; not all fused: {stock}; failed: {dict(failures)}")


def measure(rank, runs, mode, options, result, failures) -> None:
    device = options.device
    steps = {way: micro(run, mode) for way, run in runs.items()}

    def set_up(way):
        return micro(runs[way], mode)

    peaks = failures.attempt(steps, lambda way: peak_bytes(set_up(way), device) / 2**20)
    turns, issues = {way: [] for way in peaks}, {way: [] for way in peaks}
    for turn in range(options.runs + 2):
        for way in peaks:
            step = set_up(way)
            ms = timed(step, device)
            parts = runs[way].issue(device)
            if turn > 1:
                turns[way].append(ms)
                issues[way].append(parts)
    lora = statistics.median(turns["peft_lora"]) if "peft_lora" in turns else None
    cells = []
    for way in peaks:
        ms = statistics.median(turns[way])
        issue = {part: round(statistics.median(each[i] for each in issues[way]), 3) for i, part in enumerate(PARTS)}
        row = {"way": way, "mode": mode, "ms": round(ms, 3), "peak_mb": round(peaks[way], 1), "issue_ms": issue}
        row["least_ms"] = round(min(turns[way]), 3)
        if lora:
            row["of_lora"] = round(ms / lora, 4)
        result["rows"].append(row)
        cells.append([way, mode, row["ms"], row["least_ms"], row.get("of_lora", ""), row["peak_mb"], *issue.values()])
    head = ["way", "mode", "ms", "least", "of LoRA", "peak MB", *(f"issue {part}" for part in PARTS)]
    if rank == 0:
        print(table(head, cells), flush=True)
        save(options.json, result)


def show(rank: int, found: dict) -> None:
    if rank == 0:
        for name, value in found.items():
            print(name, json.dumps(value), flush=True)


def parse(argv=None):
    parser = command(__doc__, runs=9)
    parser.add_argument("--world", type=int, default=2, help="processes")
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp", help="tensor parallel: tp, or rows or columns alone")
    parser.add_argument("--model", choices=[m for m in ARCHITECTURES if "vl" not in m], default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--r", type=int, default=64)
    parser.add_argument("--loss-tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations")
    parser.add_argument("--adapter", choices=DTYPES, default="bf16", help="of A, B and m")
    parser.add_argument("--ways", help="default: all that the layout has")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--compiled", action="store_true", help="torch.compile of each decoder layer")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a smoke test")
    parser.add_argument("--no-profile", action="store_true")
    options = parser.parse_args(argv)
    every = (*WAYS, "peft_fdora_shards", "peft_fdora_fused_shards") if options.layout == "fsdp" else ("peft_lora", "peft_fdora")
    options.ways = options.ways.split(",") if options.ways else list(every)
    options.modes, options.sweep = options.modes.split(","), None
    if options.runs < 1 or options.seq < 2:
        parser.error("--runs and --seq must be at least 1 and 2")
    return options


def main(argv=None):
    options = parse(argv)
    run_in_processes(options.world, options.device, worker, options)


if __name__ == "__main__":
    main()
