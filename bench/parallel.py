"""Weights that several GPUs hold together, as functions: a layer cut by rows or by columns, and norms of a model's shards.

    python -m bench.parallel --world 2 --device cuda --json FILE
    python -m bench.parallel --world 2 --tiny --runs 1     # gloo, CPU

Layers of Llama-3.1-8B and Qwen2.5-32B, M tokens, forward and forward with backward, wall time from one barrier until every
rank's GPU is done, median of turns. ``lora``: LoRA on this rank's parts, with the collectives of Megatron: y of columns is
summed over the ranks once, with the adapter's share in it, dx of rows likewise. ``fdora``: dora_linear on the same parts with
the same collectives, given its norm. ``fdora_dtensor``: dora_linear on DTensors. The gradients of what every rank has whole are
left pending in all three. ``fdora`` and ``fdora_dtensor`` are compared with one process's before they are timed.

Norms: dora_norm_tree of all linears of some decoder layers, once as one process computes them (``1``), once on FSDP2's shards,
gathered (``world``), with its two collectives.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bench.clock import synchronize
from bench.layers12 import DTYPES, MOST_APART
from bench.processes import run_in_processes
from bench.records import save
from bench.suite import about, command
from bench.table import table
from bench.ways import S
from fdora.functional import dora_linear, dora_norm, dora_norm_tree

# hidden and intermediate size of the models, and what k and v have
WIDTHS = {"llama-3.1-8b": (4096, 14336, 1024), "qwen2.5-32b": (5120, 27648, 1024)}
CUTS = {"rows": dict(x=Replicate(), W=Shard(0), A=Replicate(), B=Shard(0), m=Shard(0), norm=Shard(0))}
CUTS["columns"] = dict(x=Shard(-1), W=Shard(1), A=Shard(1), B=Replicate(), m=Replicate(), norm=Replicate())
TRAINED = ("x", "A", "B", "m")


class Whole(torch.autograd.Function):
    """The sum over the ranks, whose gradient every rank has already. In place, unless the layer keeps y for backward."""

    @staticmethod
    def forward(ctx, y, kept):
        y = y.clone() if kept else y
        if not kept:
            ctx.mark_dirty(y)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Shared(torch.autograd.Function):
    """What every rank has, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.contiguous()
        dist.all_reduce(dx)
        return dx


def made(N: int, K: int, M: int, r: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """The same on every rank."""
    draw = torch.Generator(device).manual_seed(0)
    shapes = {"x": (M, K), "W": (N, K), "A": (r, K), "B": (N, r), "spread": (N,)}
    t = {name: torch.randn(shape, generator=draw, device=device, dtype=dtype) for name, shape in shapes.items()}
    scales = {"x": 1, "W": K**-0.5, "A": K**-0.5, "B": 0.02}
    t = {name: scales[name] * v for name, v in t.items() if name in scales} | {"spread": t["spread"]}
    norm = dora_norm(t["W"], t["A"], t["B"], s=S)
    return t | {"m": (norm * (1 + 0.1 * t.pop("spread"))).to(dtype), "norm": norm}


def laid(t: dict[str, torch.Tensor], cut: str, mesh: Any) -> dict[str, DTensor]:
    return {name: distribute_tensor(v, mesh, [CUTS[cut][name]]) for name, v in t.items()}


def lora(x, W, A, B, m, norm):
    return F.linear(x, W) + S * F.linear(F.linear(x, A), B)


def fdora(x, W, A, B, m, norm):
    return dora_linear(x, W, A, B, m, s=S, norm=norm)


def on_parts(layer: Callable, cut: str) -> Callable:
    if cut == "rows":
        return lambda x, *rest: layer(Shared.apply(x), *rest)
    return lambda *args: Whole.apply(layer(*args), layer is fdora)


def on_dtensors(x, *rest):
    y = fdora(x, *rest)
    return y.redistribute(placements=[Replicate()]) if y.placements[0].is_partial() else y


def ways(cut: str, t: dict[str, torch.Tensor], mesh: Any) -> dict[str, tuple[Callable, list]]:
    """Of each: the function, and its arguments, leaves where they are trained."""

    def leaves(dtensors: bool, trained=TRAINED) -> list:
        found = {name: v if dtensors else v.to_local().clone() for name, v in laid(t, cut, mesh).items()}
        return [v.detach().requires_grad_(name in trained) for name, v in found.items()]

    return {
        "lora": (on_parts(lora, cut), leaves(False, TRAINED[:3])),
        "fdora": (on_parts(fdora, cut), leaves(False)),
        "fdora_dtensor": (on_dtensors, leaves(True)),
    }


def run(fn: Callable, args: list, dy: torch.Tensor, backward: bool):
    """dy is this rank's part, as a way that has plain tensors wants it."""
    if not backward:
        with torch.no_grad():
            return fn(*args)
    y = fn(*args)
    wanted = [v for v in args if v.requires_grad]
    given = DTensor.from_local(dy, y.device_mesh, y.placements, run_check=False) if isinstance(y, DTensor) else dy
    grads = torch.autograd.grad(y, wanted, given)
    if isinstance(y, DTensor) and grads[0].placements[0].is_partial():
        grads = (grads[0].redistribute(placements=[Replicate()]), *grads[1:])
    return y, *grads


def errors(cut: str, t: dict[str, torch.Tensor], dy: torch.Tensor, mesh: Any) -> dict[str, float]:
    """The largest relative error of y and the gradients of each of fdora's ways, all ranks' parts together."""
    args = [v.clone().requires_grad_(name in TRAINED) for name, v in t.items()]
    y = fdora(*args)
    truth = [y, *torch.autograd.grad(y, [v for v in args if v.requires_grad], dy)]
    mine = dy.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() if cut == "rows" else dy
    found = {}
    for way, (fn, given) in ways(cut, t, mesh).items():
        if way == "lora":
            continue
        got = run(fn, given, mine, True)
        worst = 0.0
        for name, have, want in zip(("y", *TRAINED), got, truth, strict=True):
            have = have.full_tensor() if isinstance(have, DTensor) else gathered(have, want, cut, name)
            worst = max(worst, ((have - want).float().norm() / want.float().norm()).item())
        found[way] = worst
    return found


def gathered(part: torch.Tensor, want: torch.Tensor, cut: str, name: str) -> torch.Tensor:
    """Of plain parts: rows or columns behind each other, or the sum of what is pending."""
    axis = next((i for i, n in enumerate(want.shape) if part.shape[i] != n), None)
    if axis is not None:
        parts = [torch.empty_like(part.contiguous()) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, axis)
    if (cut, name) in (("rows", "A"), ("columns", "B"), ("columns", "m")):
        part = part.clone()
        dist.all_reduce(part)
    return part


def timed(step: Callable[[], object], device: str) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def medians(steps: dict[str, Callable], device: str, runs: int) -> dict[str, float]:
    turns = [{name: timed(step, device) for name, step in steps.items()} for _ in range(runs + 2)]
    return {name: round(statistics.median(turn[name] for turn in turns[2:]), 4) for name in steps}


def layers(rank: int, options, mesh: Any, device: str) -> list[dict]:
    rows = []
    for model, (hidden, inner, _) in options.widths.items():
        for r in options.r:
            for cut, (N, K) in {"rows": (inner, hidden), "columns": (hidden, inner)}.items():
                t = made(N, K, options.M, r, DTYPES[options.dtype], device)
                draw = torch.Generator(device).manual_seed(1)
                dy = torch.randn(options.M, N, generator=draw, device=device, dtype=t["W"].dtype)
                row = {"model": model, "cut": cut, "N": N, "K": K, "r": r, "errors": errors(cut, t, dy, mesh)}
                mine = dy.chunk(options.world, 1)[rank].contiguous() if cut == "rows" else dy
                each = ways(cut, t, mesh)
                for kind, backward in (("forward", False), ("both", True)):
                    steps = {way: (lambda fn=fn, args=args: run(fn, args, mine, backward)) for way, (fn, args) in each.items()}
                    row[kind] = medians(steps, device, options.runs)
                rows.append(row)
    return rows


def norms(options, mesh: Any, device: str) -> list[dict]:
    rows = []
    for model, (hidden, inner, kv) in options.widths.items():
        shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
        for r in options.r:
            weights, params, shards, parts = [], [], [], []
            for N, K in shapes * options.layers:
                t = made(N, K, 1, r, DTYPES[options.dtype], device)
                weights.append(t["W"])
                params.append((t["A"], t["B"]))
                shards.append(distribute_tensor(t["W"], mesh, [Shard(0)]))
                parts.append(tuple(distribute_tensor(t[name], mesh, [Shard(0)]) for name in "AB"))
            steps = {
                "1": lambda w=weights, p=params: dora_norm_tree(w, p, s=S),
                "world": lambda w=shards, p=parts: dora_norm_tree(w, p, s=S, gather=True),
            }
            error = max([((a - b) / b).abs().max().item() for a, b in zip(steps["world"](), steps["1"](), strict=True)])
            row = {"model": model, "r": r, "layers": options.layers, "error": error}
            rows.append(row | medians(steps, device, options.runs))
    return rows


def worker(rank: int, options) -> None:
    device = f"cuda:{rank}" if options.device == "cuda" else "cpu"
    mesh = dist.init_device_mesh(options.device, (options.world,))
    result = {"about": about(options.device, options.commit, None), "world": options.world, "M": options.M}
    result |= {"dtype": options.dtype, "runs": options.runs, "layers": layers(rank, options, mesh, device)}
    result["norms"] = norms(options, mesh, device)
    if rank:
        return
    print(json.dumps(result["about"]))
    head = ["model", "cut", "r", "time", "lora", "fdora", "fdora_dtensor", "fdora of lora", "fdora_dtensor of lora", "error"]
    cells = []
    for row in result["layers"]:
        for kind in ("forward", "both"):
            ms = list(row[kind].values())
            ratios = [round(each / ms[0], 3) for each in ms[1:]]
            cells.append([row["model"], row["cut"], row["r"], kind, *ms, *ratios, f"{max(row['errors'].values()):.1e}"])
    print(table(head, cells))
    lines = [[row["model"], row["r"], row["layers"], row["1"], row["world"], f"{row['error']:.1e}"] for row in result["norms"]]
    print(table(["norms of", "r", "layers", "1 process, ms", f"{options.world} processes, ms", "error"], lines))
    save(options.json, result)
    wrong = [row for row in result["layers"] if not max(row["errors"].values()) <= MOST_APART[options.dtype]]
    wrong += [row for row in result["norms"] if not row["error"] <= 1e-6]
    if wrong:
        raise SystemExit(f"apart from one process: {wrong}")


def parse(argv=None):
    parser = command(__doc__, runs=9)
    parser.add_argument("--world", type=int, default=2, help="processes")
    parser.add_argument("--M", type=int, default=4096, help="tokens")
    parser.add_argument("--r", type=lambda s: [int(r) for r in s.split(",")], default=[64, 384])
    parser.add_argument("--layers", type=int, default=4, help="decoder layers whose norms are computed")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a smoke test")
    options = parser.parse_args(argv)
    options.widths = {"tiny": (64, 96, 32)} if options.tiny else WIDTHS
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    return options


def main(argv=None):
    options = parse(argv)
    run_in_processes(options.world, options.device, worker, options)


if __name__ == "__main__":
    main()
