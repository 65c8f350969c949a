"""The norms of all adapted linears of a model in one call, and what each of its launches takes.

    python -m bench.norm_model --device cuda [--json FILE]
    python -m bench.norm_model --device cuda --tiles --models llama-3.1-8b --layers 1 --r 16,64,128,384

Layers of Qwen3-8B's and Qwen3-1.7B's shapes, bf16. ``plain``: with no state. ``changed``: with a state that nothing matches;
``unchanged``: with one that matches, where the bits of A and B alone are read; ``layers``: the same as a loop of dora_norm with
a state for each, which the launches for a model replaced. GPU ms by torch's profiler: of each kernel, and their sum.
``bytes_ms``: what must be read, W, A and B or A and B, over a measured copy. ``--tiles``: ``plain`` in other tiles than
fdora/triton/configs.py chooses, too, checked against the chosen one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bench.command import command
from bench.norm_forms import about, roofs
from bench.records import save
from bench.table import table
from fdora.functional import _tree, dora_norm, dora_norm_state, dora_norm_tree, dora_norm_tree_state

S, CALLS = 2.0, 10
# hidden size, width of the MLP, N of k and v
MODELS = {
    "qwen3-8b": (4096, 12288, 1024),
    "qwen3-1.7b": (2048, 6144, 1024),
    "llama-3.1-8b": (4096, 14336, 1024),
    "tiny": (64, 96, 32),
}


# rows, columns, slab of the rank (0: as wide as the rank), warps, stages, tiles of W ahead, programs on a multiprocessor
NARROW = [(n, 64, 0, 4, 3, ahead, programs) for n, programs in ((64, 8), (128, 4)) for ahead in (0, 2, 3, 4)]
NARROW += [(128, 128, 0, 8, 3, ahead, 2) for ahead in (0, 3)] + [(128, 128, 16, 4, 3, 0, 2), (128, 128, 32, 8, 3, 0, 2)]
MIDDLE = [(64, 64, 0, 4, 3, 3, 4), (64, 64, 0, 4, 3, 2, 4), (128, 64, 0, 8, 3, 3, 2), (64, 128, 0, 8, 3, 3, 2)]
WIDE = [(64, 128, 64, 4, 3, 0, 4), (128, 64, 64, 4, 3, 0, 4), (128, 128, 64, 8, 3, 0, 2), (128, 128, 32, 8, 3, 0, 2)]


def linears(model: str, layers: int, r: int, device: str) -> tuple[list, list]:
    width, mlp, kv = MODELS[model]
    shapes = [(width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width), (width, mlp)] * layers
    W = [torch.randn(n, k, device=device).mul_(k**-0.5).bfloat16() for n, k in shapes]
    pairs = [(torch.randn(r, k, device=device).bfloat16(), torch.randn(n, r, device=device).bfloat16()) for n, k in shapes]
    return W, pairs


def kernels(call: Callable[[], object], device: str) -> dict[str, float]:
    """GPU ms of each kernel of a call; of the whole call on a CPU."""
    call()
    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as found:
        for _ in range(CALLS):
            call()
        if device != "cpu":
            torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        us = event.self_cpu_time_total if device == "cpu" else event.self_device_time_total
        times["cpu" if device == "cpu" else event.key] += us / 1e3 / CALLS
    return dict(times)


def case(model: str, layers: int, r: int, device: str, speed: float | None) -> list[dict]:
    W, pairs = linears(model, layers, r, device)
    new = dora_norm_tree_state(W)
    kept = dora_norm_tree(W, pairs, s=S, state=new)
    states = [dora_norm(w, *p, s=S, state=dora_norm_state(w)) for w, p in zip(W, pairs, strict=True)]
    ways = {
        "plain": lambda: dora_norm_tree(W, pairs, s=S),
        "changed": lambda: dora_norm_tree(W, pairs, s=S, state=new),
        "unchanged": lambda: dora_norm_tree(W, pairs, s=S, state=kept),
        "layers": lambda: [dora_norm(w, *p, s=S, state=old) for w, p, old in zip(W, pairs, states, strict=True)],
    }
    rows, factors = [], sum(t.nbytes for pair in pairs for t in pair)
    for name, call in ways.items():
        each = kernels(call, device)
        row = {"model": model, "layers": layers, "r": r, "way": name, "ms": round(sum(each.values()), 4)}
        row["kernels"] = {kernel: round(ms, 5) for kernel, ms in each.items()}
        if speed:
            read = factors + (sum(w.nbytes for w in W) if name in ("plain", "changed") else 0)
            row["bytes_ms"] = round(read / speed, 4)
        rows.append(row)
    return rows


def tiles(model: str, layers: int, r: int, device: str) -> list[dict]:
    from fdora.triton.configs import TreeConfig, power_of_two  # without Triton there are no tiles

    W, pairs = linears(model, layers, r, device)
    want = dora_norm_tree(W, pairs, s=S)
    rows = [{"tile": None, "ms": sum(kernels(lambda: dora_norm_tree(W, pairs, s=S), device).values())}]
    for n, k, slab, *how in NARROW if r <= 64 else MIDDLE + WIDE if r <= 128 else WIDE:
        tile = TreeConfig(n, k, slab or power_of_two(r), *how)
        with (
            mock.patch("fdora.triton.tree_table.tree_config", lambda *_, tile=tile: tile),
            mock.patch.object(_tree, "_plans", []),
        ):
            for mine, right in zip(dora_norm_tree(W, pairs, s=S), want, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-6, atol=0)
            rows.append({"tile": tile, "ms": sum(kernels(lambda: dora_norm_tree(W, pairs, s=S), device).values())})
    return [{"model": model, "layers": layers, "r": r, "way": "plain"} | row | {"ms": round(row["ms"], 4)} for row in rows]


def main(argv: list[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--models", default="qwen3-8b,qwen3-1.7b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--r", default="16,384")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args(argv)
    speed = None if options.device == "cpu" else roofs(options.device)["bytes_per_ms"]
    rows = []
    for model in options.models.split(","):
        for r in map(int, options.r.split(",")):
            given = model, options.layers, r, options.device
            rows += tiles(*given) if options.tiles else case(*given, speed)
            save(options.json, {"about": about(options.device, options.commit, argv), "rows": rows})
    heads = ("model", "layers", "r", "way", "ms", "bytes", "kernels")
    shown = [[*(row[head] for head in heads[:5]), row.get("bytes_ms", ""), row.get("kernels") or row["tile"]] for row in rows]
    print(table(heads, shown))


if __name__ == "__main__":
    main()
