"""Full DoRA: what gradients through the norm cost a layer, beside the norm as a constant.

    python -m bench.full --device cuda --json FILE

Forward and backward of ``dora_linear`` with ``detach=False`` and with ``detach=True``, the norm computed inside and given, GPU
time of replayed CUDA graphs (CPU wall time), medians of turns. Before they are timed both are compared with float64: y and all
gradients, through a norm that is differentiated or not. The goal is 1.10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.clock import medians_of
from bench.kernels import by_name, profiled, shares
from bench.suite import Suite
from bench.truth import errors, exact, gradients
from bench.ways import Inputs, S, fdora

GOAL = 1.10
SHAPES = ((4096, 4096, 4096, 16), (4096, 4096, 4096, 384), (4096, 4096, 14336, 64))  # M, K, N, r
SHAPES += ((512, 4096, 4096, 16), (512, 4096, 4096, 64), (512, 4096, 4096, 384), (512, 14336, 4096, 16))
MOST_APART = 0.02  # relative L2, bf16


def truth(i: Inputs, detach: bool) -> dict[str, Tensor]:
    leaves = {name: getattr(i, name) for name in ("x", "A", "B", "m")}
    return gradients(lambda t: exact(W=i.W, s=S, detach=detach, **t), leaves, i.dy)


def kernels_of(i: Inputs) -> None:
    """What a step runs with the norm given, the longest first: those that full DoRA adds have other names or more time."""
    for detach in (True, False):
        for _ in range(2):
            kernels = by_name(profiled(fdora(i, i.norm, detach=detach).both), 1)
        print(f"detach={detach}\n{shares(kernels)}\n", flush=True)


def rows_of(shape: tuple[int, int, int, int], device: str, runs: int, kernels: bool = False) -> list[dict]:
    M, K, N, r = shape
    i = Inputs.random(M, K, N, r, torch.bfloat16, device)
    apart = {}
    for detach in (True, False):
        apart[detach] = max(errors(fdora(i, detach=detach).both(), truth(i, detach)).values())
        assert apart[detach] <= MOST_APART, f"{shape}, detach={detach}: {apart[detach]:.1e} from float64"
    rows = []
    for given in (False, True):
        norm = i.norm if given else None
        ms = medians_of({str(detach): fdora(i, norm, detach=detach).both for detach in (True, False)}, device, runs)
        row = {"M": M, "K": K, "N": N, "r": r, "norm": "given" if given else "inside", "detached_ms": round(ms["True"], 4)}
        row |= {"full_ms": round(ms["False"], 4), "ratio": round(ms["False"] / ms["True"], 3), "goal": GOAL}
        rows.append(row | {"error": float(f"{apart[False]:.1e}")})
    if kernels:
        kernels_of(i)
    return rows


OPTIONS = {
    "--kernels": (False, "print the kernels of a step, named and timed"),
    "--tiny": (False, "one small shape, for a smoke test"),
}


def measure(run):
    options = run.options
    for shape in run.cases(((64, 96, 80, 8),) if options.tiny else SHAPES):
        run.add(*rows_of(shape, options.device, options.runs, options.kernels))


main = Suite(measure, OPTIONS, runs=9)
