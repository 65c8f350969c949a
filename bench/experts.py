"""The experts of a mixture: dora_experts and dora_experts_mlp against loops over experts and against grouped_mm.

    python -m bench.experts --device cuda --json FILE
    python -m bench.experts --device cuda --quick

bf16 x and W, norms given. GPU time by CUDA graph (wall time on a CPU), ways in turns in one run, medians; ``wall`` is wall time
per call with the host in it. ``fwd`` runs under no_grad, ``fwd_bwd`` takes gradients of x, of the adapters and, in an MLP, of
the gates. Each token has k experts; the lengths of their segments differ, and end wherever they end. ``kept`` is MiB that a
forward keeps for its backward beside parameters and x.

    layer   gate_up on tokens that are sorted already, by offsets
    mlp     tokens by ids and gates through gate_up, silu and down, and back

    frozen_loop     F.linear for each expert: no adapter; lengths known on the host, as for all loops
    lora_loop       LoRA for each expert by F.linear
    loop            dora_linear for each expert
    frozen_grouped  torch.nn.functional.grouped_mm: no adapter
    lora_grouped    LoRA by grouped_mm
    fdora           dora_experts, dora_experts_mlp
    fdora_inside    the same, its norms computed in every call

An MLP of a rival takes the rows of each token by an index that is there, and adds them up by index_add; fdora sorts in its
call.
``norm``: all norms of a stack in one launch, one expert's after the other, and by dora_norm_tree.

Before it is timed every fdora way is compared with float64: y and the gradients of x and the gates, in a layer of all
parameters. A way that cannot run is listed with its reason, and a wrong fdora fails the command at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bench.attempt import Failures
from bench.experts_case import MODELS, Case, S, given_of, layer_errors, layer_way, mlp_errors, mlp_way
from bench.multi import Timed, timed
from bench.suite import One, Some, Suite
from bench.truth import rel_l2
from bench.ways import ADAPTERS, by_mode, checked, ratios
from fdora.functional import dora_norm, dora_norm_tree

WAYS = ("frozen_loop", "lora_loop", "loop", "frozen_grouped", "lora_grouped", "fdora", "fdora_inside")
OURS = ("loop", "fdora", "fdora_inside")
TOLERANCE = 1e-2


def run(kind: str, model: str, T: int, r: int, options) -> list[dict]:
    case = Case.random(model, T, r, ADAPTERS[options.adapter], options.device)
    build, errors = (layer_way, layer_errors) if kind == "layer" else (mlp_way, mlp_errors)
    ways, error, failed, _, kept = checked(
        options.ways,
        lambda name: build(name, case),
        lambda name, way: errors(way, case) if name in OURS else (way.both(), {})[1],
        TOLERANCE,
        options.device,
        OURS,
        given=given_of(case),
    )
    error = {name: each for name, each in error.items() if each}
    rows = []
    for mode, fns in by_mode(ways):
        times = timed(fns, failed, options)
        facts = {"kind": kind, "model": model, "T": T, "r": r, "adapter": options.adapter, "mode": mode}
        rows.append(row_of(facts, times) | {"error": error, "kept": kept, "failed": dict(failed)})
    return rows


def row_of(facts: dict, times: Timed) -> dict:
    return {**facts, **times._asdict(), "ratio": ratios(times.ms, (("fdora", n) for n in times.ms))}


def norms(model: str, r: int, options) -> list[dict]:
    i = Case.random(model, 8, r, ADAPTERS[options.adapter], options.device).up
    stacks = [list(t.unbind()) for t in (i.W, i.A, i.B, i.m)]
    params = list(zip(*stacks[1:], strict=True))
    fns = {
        "loop": lambda: torch.stack([dora_norm(w, a, b, s=S) for w, a, b, _ in zip(*stacks, strict=True)]),
        "tree": lambda: dora_norm_tree(stacks[0], params, s=S),
        "fdora": lambda: dora_norm(i.W, i.A, i.B, s=S),
    }
    failed, error = Failures(), {"fdora": {"c": float(f"{rel_l2(dora_norm(i.W, i.A, i.B, s=S), i.norm.double()):.2e}")}}
    assert error["fdora"]["c"] < 1e-5, f"fdora is wrong: {error['fdora']}"
    facts = {"kind": "norm", "model": model, "T": 0, "r": r, "adapter": options.adapter, "mode": "norm"}
    return [row_of(facts, timed(fns, failed, options)) | {"error": error, "kept": {}, "failed": dict(failed)}]


def cases(options) -> list[tuple[str, Callable[[], list[dict]]]]:
    found = []
    for model in options.models:
        for r in options.r:
            for T in options.T:
                for kind in ("mlp", "layer"):
                    found.append((f"{kind} {model} T={T} r={r}", lambda a=(kind, model, T, r): run(*a, options)))
        found.append((f"norm {model}", lambda a=(model, options.r[0]): norms(*a, options)))
    return found


OPTIONS = {
    "--models": Some(MODELS, ["mixtral", "qwen3-30b", "gpt-oss-20b"]),
    "--T": ([64, 4096], "tokens, each of k experts"),
    "--r": [16, 64],
    "--adapter": One(ADAPTERS, "bf16"),
    "--ways": Some(WAYS),
    "--loop-ms": (20.0, "of wall time, at least, in one measurement"),
}


def measure(suite):
    suite.set(failed=suite.failed)
    found = dict(cases(suite.options))
    for name in suite.cases(found):
        suite.add(*suite.failed.attempt([name], lambda name: found[name]()).get(name, []))
    suite.end(*OURS, "layer", "mlp", "norm")


main = Suite(measure, OPTIONS, runs=9, seconds=math.inf, quick={"T": [4096], "r": [16], "runs": 3})
