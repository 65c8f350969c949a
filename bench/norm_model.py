"""The norms of all adapted linears of a model in one call, and what each of its launches takes.

    python -m bench.norm_model --device cuda [--json FILE]

Layers of Qwen3-8B's and Qwen3-1.7B's shapes, bf16. ``plain``: with no state. ``changed``: with a state that nothing matches;
``unchanged``: with one that matches, where the bits of A and B alone are read; ``layers``: the same as a loop of dora_norm with
a state for each, which the launches for a model replaced. GPU ms by torch's profiler: of each kernel, and their sum.
``bytes_ms``: what must be read, W, A and B or A and B, over a measured copy. Other tiles: ``python -m bench tune tree``.
"""

from __future__ import annotations

from itertools import product

import torch

from bench.decoder import DTYPES
from bench.kernels import by_name, profiled
from bench.suite import Some, Suite
from fdora.functional import dora_norm, dora_norm_state, dora_norm_tree, dora_norm_tree_state

S, CALLS = 2.0, 10
# hidden size, width of the MLP, N of k and v
MODELS = {
    "qwen3-8b": (4096, 12288, 1024),
    "qwen3-1.7b": (2048, 6144, 1024),
    "llama-3.1-8b": (4096, 14336, 1024),
    "tiny": (64, 96, 32),
}


def linears(sizes: tuple[int, ...], layers: int, r: int, dtype: torch.dtype, device: str) -> tuple[list, list]:
    """W, and A with B, of all linears: of this hidden size, width of the MLP, N of k and v."""
    width, mlp, kv = sizes
    shapes = [(width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width), (width, mlp)] * layers
    W = [torch.randn(n, k, device=device).mul_(k**-0.5).bfloat16() for n, k in shapes]
    pairs = [tuple(torch.randn(shape, device=device).to(dtype) for shape in ((r, k), (n, r))) for n, k in shapes]
    return W, pairs


def case(model: str, layers: int, r: int, adapter: str, device: str, speed: float | None) -> list[dict]:
    W, pairs = linears(MODELS[model], layers, r, DTYPES[adapter], device)
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
        call()
        each = by_name(profiled(call, device, CALLS), 1e3 * CALLS)
        row = {"model": model, "layers": layers, "r": r, "adapter": adapter, "way": name}
        row["ms"] = round(sum(ms for _, ms in each), 4)
        row["kernels"] = {kernel: round(ms, 5) for kernel, ms in each}
        if speed:
            read = factors + (sum(w.nbytes for w in W) if name in ("plain", "changed") else 0)
            row["bytes_ms"] = round(read / speed, 4)
        rows.append(row)
    return rows


OPTIONS = {
    "--models": Some(MODELS, ["qwen3-8b", "qwen3-1.7b"]),
    "--layers": 12,
    "--r": [16, 384],
    "--adapter": Some(DTYPES, ["bf16"]),
}


def measure(run):
    options, speed = run.options, run.facts.get("bytes_per_ms")
    for model, r, adapter in run.cases(product(options.models, options.r, options.adapter)):
        run.add(*case(model, options.layers, r, adapter, options.device, speed))


main = Suite(measure, OPTIONS)
