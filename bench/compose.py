"""Time compose and delta: the kernels, eager fdora, and the formula as a framework writes it.

    python -m bench.compose [--device cuda] [--json FILE]

Forward, and forward with backward, in GPU time (replayed CUDA graphs) or CPU wall time; medians of turns. ``copy`` is the time
that the fewest possible bytes take at measured copy speed.
"""

from __future__ import annotations

from itertools import product

import torch

from bench.suite import Suite, shapes
from bench.truth import rel_l2
from bench.ways import S, differentiated, mode_ms
from fdora.functional import dora_compose, dora_delta, select_backend

SHAPES = shapes("4096x4096,4096x14336,16x4096,16384x4096")


def plain(base, lora, g, delta):
    g = g.to(base.dtype)
    return (g - 1) * base + g * (S * lora) if delta else g * (base + S * lora)


def case(M, N, delta, device, runs, facts):
    torch.manual_seed(0)
    base, lora, dy = (torch.randn(M, N, device=device).bfloat16() for _ in range(3))
    g = 1 + 0.0015 * torch.randn(N, device=device)
    leaves = [t.requires_grad_() for t in (base, lora, g)]
    op = dora_delta if delta else dora_compose
    ways = {"plain": lambda: plain(*leaves, delta), "eager": lambda: op(*leaves, s=S, backend="eager")}
    if select_backend(base).name == "triton":
        ways["triton"] = lambda: op(*leaves, s=S)
    truth = ((g.double() - int(delta)) * base.double() + g.double() * S * lora.double()).detach()
    for name, way in ways.items():
        error = rel_l2(way().detach(), truth)
        assert name == "plain" or error <= 1.7e-3, f"{name} is wrong by {error:.1e}"
    named = dict(zip(("base", "lora", "g"), leaves, strict=True))
    row = {"op": op.__name__, "M": M, "N": N}
    row |= mode_ms({name: differentiated(way, named, dy) for name, way in ways.items()}, device, runs)
    if "bytes_per_ms" in facts:  # 2 reads, 1 write; then 3 reads, 2 writes
        row |= {
            f"{mode}_copy_ms": round(n * base.nbytes / facts["bytes_per_ms"], 4) for mode, n in (("fwd", 3), ("fwd_bwd", 8))
        }
    return row


def measure(run):
    device = run.options.device
    usual = SHAPES[2:3] if device == "cpu" else SHAPES
    for shape, delta in run.cases(product(run.options.shapes or usual, (False, True))):
        run.add(case(*shape, delta, device, run.options.runs, run.facts))


main = Suite(measure, {"--shapes": (shapes, "tokens x width")}, runs=9)
