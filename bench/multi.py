"""Many adapters on one W: dora_linear_multi against one layer's call with all tokens, a loop of calls, and what others do.

    python -m bench.multi --device cuda --json FILE
    python -m bench.multi --device cuda --quick

bf16 x and W, norms given. GPU time by CUDA graph (wall time on a CPU), ways in turns in one run, medians; ``wall`` is wall time
per call with the host in it. ``fwd`` runs under no_grad, ``fwd_bwd`` takes gradients of x and all adapters. Tokens are sorted;
segments have other lengths, and end wherever they end. ``mixed`` ranks are 8 to 256 in turns; ``one`` then has the rank of the
mean, so that it does as much.

    frozen       the layer without adapters, by torch: the products with W that every way has, x W^T and dy W
    one          dora_linear with all tokens on one adapter: what a call costs when nothing is routed
    loop         dora_linear for each adapter on its tokens, the lengths known on the host
    multi        dora_linear_multi by offsets; multi_ids by the adapter of each token, in an order by chance
    grouped_lora LoRA with torch.nn.functional.grouped_mm: no magnitude
    lorafusion   LoRA by LoRAFusion's grouped kernels, from ``--rival-path`` (bench/checkouts.py): no magnitude. At most four
                 adapters of one rank, each with tensors of its own; x and dy are padded to its tiles beforehand
    peft_loop    the formula of PEFT's mixed batches: the base for all tokens, then of each adapter's tokens a gather, DoRA's
                 correction and a scatter. As PEFT writes it for one adapter, its norm given

``of_bound``: of one adapter's call, and of the other adapters A and B read once at the speed of a copy: what a call with all of
them must take. ``serve``: a few hundred tokens of six adapters; its target is one of that.
``decode``: 64 tokens of 64 adapters under no_grad, against one call with 64 tokens. ``fwd`` calls one layer again and again,
whose W may stay in the GPU's cache beside one adapter and not beside 64 of them; ``fwd_cold`` calls several layers in turn.
``norm``: all norms of a bank against one.
Every way is compared with float64 before it is timed; one that cannot run is listed with its reason, and a wrong fdora fails
the command at its end. The JSON is rewritten after every case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from bench.attempt import Failures
from bench.checkouts import RIVAL_PATH
from bench.clock import free, medians, medians_of, wall_timer
from bench.kernels import by_name, profiled
from bench.multi_ways import WAYS, Bank, S, build, errors, truths
from bench.suite import One, Some, Suite, shapes
from bench.truth import rel_l2
from bench.ways import ADAPTERS, checked, ratios
from fdora.functional import dora_norm

MIXED = (8, 16, 32, 64, 128, 256)
TOLERANCE = 5e-3
CACHE = 150_000_000  # bytes of weights that no cache holds
TARGETS = {"train": 1.08, "serve": 1.15, "decode": 1.3, "norm": 1.5}  # multi over one; lorafusion over multi: at least 1.2
BANKS = ("multi", "multi_ids")


def kernels(fn: Callable[[], object], device: str) -> dict[str, float]:
    """us of GPU time in one call, by kernel."""
    for _ in range(3):
        fn()
    found = profiled(fn, device, 10)
    count = Counter(each.name for each in found)
    return {f"{count[name] // 10} x {name[:60]}": round(us, 2) for name, us in by_name(found, 10)}


class Timed(NamedTuple):
    """Time of each way by CUDA graph and, with the host in it, by wall clock."""

    ms: dict[str, float]
    wall: dict[str, float]


def timed(fns: dict[str, Callable[[], object]], failed: Failures, options, calls: int = 1) -> Timed:
    """``calls``: how many each of them makes."""
    ms = medians_of(fns, options.device, options.runs, failed)
    walls = failed.attempt(fns, lambda name: wall_timer(fns[name], options.device, options.loop_ms))
    return Timed(*({n: round(v / calls, 5) for n, v in each.items()} for each in (ms, medians(walls, options.runs))))


def row_of(kind: str, times: Timed, target: float, **facts) -> dict:
    pairs = [(n, one) for one in ("one", "multi") for n in times.ms if (n, one) != ("one", "multi")]
    return {"kind": kind, **facts, "target": target, **times._asdict(), "ratio": ratios(times.ms, pairs)}


def of_bound(ms: dict[str, float], ranks: list[int], bytes_of_a_rank: int, bytes_per_ms: float) -> dict[str, float]:
    others = (sum(ranks) - sum(ranks) / len(ranks)) * bytes_of_a_rank / bytes_per_ms
    return {n: round(ms[n] / (ms["one"] + others), 3) for n in BANKS if "one" in ms and n in ms}


def train(M: int, K: int, N: int, ranks: list[int], label: str, kind: str, options, bytes_per_ms: float) -> list[dict]:
    """``decode`` has no backward, but weights out of memory."""
    bank = Bank.random(M, K, N, ranks, ADAPTERS[options.adapter], options.device)
    ways, error, failed, *_ = checked(
        options.ways,
        lambda name: build(name, bank, options.rival_path),
        partial(errors, bank, truths(bank)),
        TOLERANCE,
        options.device,
        ("multi", "multi_ids", "loop"),
    )
    free(options.device)
    rows = []
    for mode in ("fwd", "fwd_cold") if kind == "decode" else ("fwd", "fwd_bwd"):
        fns, calls = {n: way.both if mode == "fwd_bwd" else way.forward for n, way in ways.items()}, 1
        if mode == "fwd_cold":
            calls = max(2, min(8, CACHE // (2 * K * N)))
            fns = in_turn(
                [bank] + [Bank.random(M, K, N, ranks, bank.A.dtype, options.device) for _ in range(calls - 1)], ways, options
            )
        facts = {"M": M, "K": K, "N": N, "G": len(ranks), "r": label, "adapter": options.adapter, "mode": mode}
        times = timed(fns, failed, options, calls)
        bound = of_bound(times.ms, ranks, (K + N) * bank.A.itemsize, bytes_per_ms)
        row = row_of(kind, times, TARGETS[kind], **facts) | {"of_bound": bound, "error": error, "failed": dict(failed)}
        if options.kernels and mode != "fwd_cold":
            row["kernels"] = {n: kernels(fns[n], options.device) for n in ("one", *BANKS) if n in fns}
        rows.append(row)
    return rows


def in_turn(banks: list[Bank], names: Iterable[str], options) -> dict[str, Callable[[], object]]:
    """Of each way a function that calls it on every bank."""
    made = {n: [build(n, bank, options.rival_path).forward for bank in banks] for n in names}
    return {n: lambda calls=calls: [call() for call in calls] for n, calls in made.items()}


def norms(K: int, N: int, G: int, r: int, options) -> list[dict]:
    """All norms of a bank at once, one of them, and one after the other."""
    i = Bank.random(8, K, N, [r] * G, ADAPTERS[options.adapter], options.device)
    W, A, B = i.W, i.A.detach(), i.B.detach()
    fns = {
        "one": lambda: dora_norm(W, A[0], B[0], s=S),
        "loop": lambda: torch.stack([dora_norm(W, A[g], B[g], s=S) for g in range(G)]),
        "multi": lambda: dora_norm(W, A, B, s=i.s),
    }
    failed = Failures()
    error = {n: {"c": float(f"{rel_l2(fns[n](), i.norm.double()):.2e}")} for n in ("loop", "multi")}
    assert error["multi"]["c"] < 1e-5, f"multi is wrong: {error['multi']}"
    facts = {"M": 0, "K": K, "N": N, "G": G, "r": str(r), "adapter": options.adapter, "mode": "norm"}
    return [row_of("norm", timed(fns, failed, options), TARGETS["norm"], **facts) | {"error": error, "failed": dict(failed)}]


class Case(NamedTuple):
    """``kind``: train, serve, decode or norm. ``label``: of the ranks."""

    kind: str
    M: int
    K: int
    N: int
    ranks: list[int]
    label: str

    @property
    def name(self) -> str:
        more = {"train": f" {self.label} {len(self.ranks)}", "serve": f" {self.M}"}.get(self.kind, "")
        return f"{self.kind} {self.K}x{self.N}{more}"

    def run(self, options, bytes_per_ms: float) -> list[dict]:
        if self.kind == "norm":
            return norms(self.K, self.N, len(self.ranks), self.ranks[0], options)
        return train(self.M, self.K, self.N, self.ranks, self.label, self.kind, options, bytes_per_ms)


def cases(options) -> list[Case]:
    """Of each shape what is short first: a limit of time leaves out the last."""
    found = []
    for K, N in options.shapes:
        found += [Case("decode", options.decode, K, N, [16] * options.decode, "16"), Case("norm", 8, K, N, [16] * 4, "16")]
        found += [Case("serve", M, K, N, [16] * 6, "16") for M in options.serve]
        for label in options.r:
            for G in options.G:
                ranks = [MIXED[g % len(MIXED)] for g in range(G)] if label == "mixed" else [int(label)] * G
                if label != "mixed" or G > 1:
                    found.append(Case("train", options.M, K, N, ranks, label))
    return found


def compile_case(case: Case, adapter: str, device: str) -> None:
    """Everything of fdora once, in a process of its own: the kernels are in Triton's cache then."""
    bank = Bank.random(case.M, case.K, case.N, case.ranks, ADAPTERS[adapter], device)
    dora_norm(bank.W, bank.A.detach(), bank.B.detach(), s=bank.s)
    for name in () if case.kind == "norm" else ("one", "loop", "multi", "multi_ids"):
        way = build(name, bank)
        way.forward()
        if case.kind != "decode":
            way.both()


OPTIONS = {
    "--shapes": dict(type=shapes, default=[(4096, 4096), (4096, 14336)], help="K x N"),
    "--M": 8192,
    "--decode": (64, "tokens, each of its own adapter"),
    "--serve": ([200, 700], "tokens of six adapters"),
    "--G": [1, 2, 4, 8, 32],
    "--r": ["16", "mixed"],
    "--adapter": One(ADAPTERS, "bf16"),
    "--ways": Some(WAYS),
    **RIVAL_PATH,
    "--loop-ms": (20.0, "of wall time, at least, in one measurement"),
    "--kernels": (False, "of one, multi and multi_ids: GPU time by kernel, as torch's profiler sees it"),
}


def ahead(options):
    return compile_case, [(case, options.adapter, options.device) for case in cases(options)]


def measure(run):
    options = run.options
    run.set(failed=run.failed)
    for case in run.cases(cases(options)):
        run.add(
            *run.failed.attempt(
                [case.name], lambda _, case=case: case.run(options, run.facts.get("bytes_per_ms", math.inf))
            ).get(case.name, [])
        )
    run.end("one", "loop", "multi", "train", "serve", "decode", "norm")


main = Suite(measure, OPTIONS, runs=9, seconds=math.inf, quick={"G": [4, 32], "runs": 3}, ahead=ahead)
