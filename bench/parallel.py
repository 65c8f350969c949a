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

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from bench.clock import medians
from bench.decoder import DTYPES, MOST_APART
from bench.processes import timed
from bench.suite import One, Run, Suite
from bench.ways import Inputs, S, lora
from fdora.functional import dora_linear, dora_norm_tree

# hidden and intermediate size of the models, and what k and v have
WIDTHS = {"llama-3.1-8b": (4096, 14336, 1024), "qwen2.5-32b": (5120, 27648, 1024)}
CUTS = {"rows": dict(x=Replicate(), W=Shard(0), A=Replicate(), B=Shard(0), m=Shard(0), norm=Shard(0))}
CUTS["columns"] = dict(x=Shard(-1), W=Shard(1), A=Shard(1), B=Replicate(), m=Replicate(), norm=Replicate())
TRAINED = ("x", "A", "B", "m")
# Plain parts of y and of the gradients of x, A, B and m
RESULTS = {"rows": (Shard(1), Replicate(), Partial(), Shard(0), Shard(0))}
RESULTS["columns"] = (Replicate(), Shard(1), Shard(1), Partial(), Partial())


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


def made(N: int, K: int, M: int, r: int, dtype: torch.dtype, device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a layer takes, and dy; the same on every rank."""
    i = Inputs.random(M, K, N, r, dtype, device)
    each = {name: getattr(i, name).detach().to(dtype) for name in ("x", "W", "A", "B", "m", "dy")}
    dy = each.pop("dy")
    return each | {"norm": i.norm}, dy


def laid(t: dict[str, torch.Tensor], cut: str, mesh: Any) -> dict[str, DTensor]:
    return {name: distribute_tensor(v, mesh, [CUTS[cut][name]]) for name, v in t.items()}


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
        got = zip(run(fn, given, mine, True), RESULTS[cut], strict=True)
        whole = [part if isinstance(part, DTensor) else DTensor.from_local(part, mesh, [place]) for part, place in got]
        pairs = zip((part.full_tensor() for part in whole), truth, strict=True)
        found[way] = max(((have - want).float().norm() / want.float().norm()).item() for have, want in pairs)
    return found


def times(steps: dict[str, Callable], run: Run, device: str) -> dict[str, float]:
    ms = medians({name: partial(timed, step, device) for name, step in steps.items()}, run.options.runs)
    return {name: round(each, 4) for name, each in ms.items()}


def layers(bench: Run, mesh: Any, device: str) -> None:
    options = bench.options
    for (model, (hidden, inner, _)), r, cut in product(options.widths.items(), options.r, CUTS):
        N, K = (inner, hidden) if cut == "rows" else (hidden, inner)
        t, dy = made(N, K, options.M, r, DTYPES[options.dtype], device)
        row = {"model": model, "cut": cut, "N": N, "K": K, "r": r, "errors": errors(cut, t, dy, mesh)}
        mine = dy.chunk(options.world, 1)[bench.rank].contiguous() if cut == "rows" else dy
        each = ways(cut, t, mesh)
        for kind, backward in (("forward", False), ("both", True)):
            row[kind] = times({way: partial(run, *pair, mine, backward) for way, pair in each.items()}, bench, device)
        bench.add(row, part="layers")


def norms(bench: Run, mesh: Any, device: str) -> None:
    options = bench.options
    for (model, (hidden, inner, kv)), r in product(options.widths.items(), options.r):
        shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
        tensors = [made(N, K, 1, r, DTYPES[options.dtype], device)[0] for N, K in shapes * options.layers]
        whole = [[t[name] for t in tensors] for name in "WAB"]
        cut = [[distribute_tensor(t, mesh, [Shard(0)]) for t in each] for each in whole]
        steps = {
            "1": partial(dora_norm_tree, whole[0], list(zip(*whole[1:], strict=True)), s=S),
            "world": partial(dora_norm_tree, cut[0], list(zip(*cut[1:], strict=True)), s=S, gather=True),
        }
        error = max([((a - b) / b).abs().max().item() for a, b in zip(steps["world"](), steps["1"](), strict=True)])
        row = {"model": model, "r": r, "layers": options.layers, "error": error}
        bench.add(row | times(steps, bench, device), part="norms")


def measure(run: Run) -> None:
    options = run.options
    device = f"cuda:{run.rank}" if options.device == "cuda" else "cpu"
    mesh = dist.init_device_mesh(options.device, (options.world,))
    run.set(world=options.world, M=options.M, dtype=options.dtype)
    layers(run, mesh, device)
    norms(run, mesh, device)


def judge(run: Run) -> None:
    wrong = [row for row in run.result["layers"] if not max(row["errors"].values()) <= MOST_APART[run.options.dtype]]
    wrong += [row for row in run.result["norms"] if not row["error"] <= 1e-6]
    if wrong:
        raise SystemExit(f"apart from one process: {wrong}")


OPTIONS = {
    "--M": (4096, "tokens"),
    "--r": [64, 384],
    "--layers": (4, "decoder layers whose norms are computed"),
    "--dtype": One(DTYPES, "bf16"),
    "--tiny": False,
}


def check(parser, options) -> None:
    options.widths = {"tiny": (64, 96, 32)} if options.tiny else WIDTHS
    if options.runs < 1:
        parser.error("--runs must be at least 1")


main = Suite(measure, OPTIONS, runs=9, world=2, check=check, judge=judge)
