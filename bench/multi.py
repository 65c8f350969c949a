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
    one_fp8, multi_fp8   one and multi on e4m3 codes with scales of rows, 8-bit products in both directions
    grouped_lora LoRA with torch.nn.functional.grouped_mm: no magnitude
    lorafusion   LoRA by LoRAFusion's grouped kernels, from ``--rival-path`` (bench/checkouts.py): no magnitude. At most four
                 adapters of one rank, each with tensors of its own; x and dy are padded to its tiles beforehand
    peft_loop    the formula of PEFT's mixed batches: the base for all tokens, then of each adapter's tokens a gather, DoRA's
                 correction and a scatter. As PEFT writes it for one adapter, its norm given

``of_bound``: of one adapter's call, and of the other adapters A and B read once at the speed of a copy: what a call with all of
them must take. ``serve``: a few hundred tokens of six adapters; its target is one of that.
``decode``: 64 tokens of 64 adapters under no_grad, against one call with 64 tokens. ``fwd`` calls one layer again and again,
whose W may stay in the GPU's cache beside one adapter and not beside 64 of them; ``fwd_cold`` calls several layers in turn.
Every way is compared with float64 before it is timed; one that cannot run is listed with its reason, and a wrong fdora fails
the command at its end. The JSON is rewritten after every case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkouts import RIVAL_PATH, lorafusion_multi, padded, unpadded
from bench.clock import Failures, free, medians, medians_of, wall_timer
from bench.kernels import by_name, profiled
from bench.suite import One, Some, Suite
from bench.truth import errors as errors_of
from bench.truth import exact
from bench.ways import (
    DTYPES,
    LEAVES,
    S,
    Truths,
    Way,
    away,
    by_formula,
    checked,
    dense_inputs,
    differentiated,
    fresh,
    in_turns,
    ratios,
)
from fdora.functional import dora_linear, dora_linear_multi, dora_norm
from fdora.quant import quantize

WAYS = ("frozen", "one", "loop", "grouped_lora", "lorafusion", "peft_loop", "multi", "multi_ids", "one_fp8", "multi_fp8")
EIGHT = {"compute": "fp8", "grad_compute": "fp8"}
LORA = ("grouped_lora", "lorafusion")


class Bank(NamedTuple):
    """x, W and dy in bf16; G adapters away from their start, their norms, and whose each token is."""

    x: Tensor
    W: Tensor
    A: Tensor
    B: Tensor
    m: Tensor
    norm: Tensor
    dy: Tensor
    s: Tensor
    offsets: Tensor
    lengths: list[int]
    ranks: list[int]

    @classmethod
    def random(cls, M: int, K: int, N: int, ranks: list[int], adapter: torch.dtype, device: str) -> Bank:
        generator, G = torch.Generator(device).manual_seed(0), len(ranks)
        x, W, dy = dense_inputs(M, K, N, generator)
        A, B, m, norm = away(W.expand(G, N, K), max(ranks), adapter, generator, ranks)
        lengths = lengths_of(M, G)
        ends = torch.tensor(lengths).cumsum(0).to(torch.int32).to(device)
        leaves = (t.requires_grad_() for t in (A, B, m))
        return cls(x.requires_grad_(), W, *leaves, norm, dy, torch.full((G,), S, device=device), ends, lengths, ranks)

    def adapter(self, g: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.A[g, : self.ranks[g]], self.B[g, :, : self.ranks[g]], self.m[g]


def lengths_of(M: int, G: int) -> list[int]:
    """Segments of 1/2 to 3/2 of the mean, in an order of their own; one token each where there are as many."""
    weight = [2 + (5 * g) % 7 % 5 for g in range(G)]
    ends = [round(M * sum(weight[: g + 1]) / sum(weight)) for g in range(G)]
    ends = list(range(1, M + 1)) if M == G else ends
    return [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def build(name: str, bank: Bank, rival_path: Sequence[Path] = ()) -> Way:
    i = fresh(bank, "xABm")  # see bench/group.py
    truth = "lora" if name in LORA else "dora"
    leaves = {n: getattr(i, n) for n in LEAVES[truth]}
    name, eight = name.removesuffix("_fp8"), name.endswith("_fp8")
    how: dict[str, Any] = dict(EIGHT) if eight else {}
    if eight:
        i = i._replace(W=quantize(i.W, "fp8", block="row", dtype=i.W.dtype))
    if name == "frozen":
        return differentiated(lambda: F.linear(i.x, i.W), {"x": i.x}, i.dy, None)
    if name == "one":
        own = {n: t.detach().contiguous().requires_grad_() for n, t in zip("ABm", of_mean_rank(i), strict=True)}
        how |= {"s": S, "norm": i.norm[0]}
        return differentiated(lambda: dora_linear(i.x, i.W, *own.values(), **how), {"x": i.x, **own}, i.dy, None)
    if name in ("multi", "multi_ids"):
        route, x, dy = {"offsets": i.offsets}, i.x, i.dy
        if name == "multi_ids":
            ids = torch.repeat_interleave(torch.arange(len(i.ranks)), torch.tensor(i.lengths))
            some = shuffled(len(ids))
            route, x, dy = {"ids": ids[some].to(x.device)}, x.detach()[some].requires_grad_(), dy[some]
        how |= {"s": i.s, "norm": i.norm, "ranks": None if len(set(i.ranks)) == 1 else i.ranks, **route}
        return differentiated(lambda: dora_linear_multi(x, i.W, i.A, i.B, i.m, **how), leaves | {"x": x}, dy)
    if name == "lorafusion":
        return lorafusion(i, rival_path)
    call = {"loop": loop, "peft_loop": peft_loop, "grouped_lora": grouped_lora}[name]
    return differentiated(lambda: call(i), leaves, i.dy, truth)


def shuffled(tokens: int) -> Tensor:
    """The order in which ``multi_ids`` gets them."""
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(0))


def of_mean_rank(i: Bank) -> tuple[Tensor, Tensor, Tensor]:
    """The first adapters below each other until there is as much of them as one token meets in the mean."""
    r = max(8, round(sum(map(int.__mul__, i.ranks, i.lengths)) / sum(i.lengths) / 8) * 8)
    at = max(range(len(i.ranks)), key=i.ranks.__getitem__)
    return i.A[at, :r], i.B[at, :, :r], i.m[0]


def parts(x: Tensor, i: Bank) -> Iterator[tuple[int, Tensor]]:
    """Adapters that have tokens, and those."""
    return ((g, part) for g, part in enumerate(x.split(i.lengths)) if len(part))


def loop(i: Bank) -> Tensor:
    return torch.cat([dora_linear(x, i.W, *i.adapter(g), s=S, norm=i.norm[g]) for g, x in parts(i.x, i)])


def peft_loop(i: Bank) -> Tensor:
    """(g - 1) base + g s lora of each adapter's tokens, added to the base of all."""
    y = F.linear(i.x, i.W)
    more = []
    for (g, x), (_, base) in zip(parts(i.x, i), parts(y, i), strict=True):
        A, B, m = i.adapter(g)
        scale = (m / i.norm[g]).to(x.dtype)
        lora = F.linear(F.linear(x, A.to(x.dtype)), B.to(x.dtype))
        more.append((scale - 1) * base + scale * lora * S)
    return y + torch.cat(more)


def grouped_lora(i: Bank) -> Tensor:
    A, B = i.A.to(i.x.dtype), i.B.to(i.x.dtype)
    h = F.grouped_mm(i.x, A.mT, offs=i.offsets)
    return F.linear(i.x, i.W) + S * F.grouped_mm(h, B.mT, offs=i.offsets)


def lorafusion(i: Bank, rival_path: Sequence[Path]) -> Way:
    each = [i.adapter(g) for g in range(len(i.ranks))]
    A, B = ([own[n].detach().clone().requires_grad_() for own in each] for n in (0, 1))
    layer = lorafusion_multi(rival_path, i.W, A, B, S, i.lengths)
    x = padded(i.x.detach(), i.lengths).requires_grad_()
    leaves = {"x": x, **{f"{n}{g}": t for n, of in (("A", A), ("B", B)) for g, t in enumerate(of)}}
    return differentiated(lambda: layer(x), leaves, padded(i.dy, i.lengths), "lora")


def as_banks(found: dict[str, Tensor], i: Bank) -> dict[str, Tensor]:
    """LoRAFusion's results in the shapes of a bank."""
    whole = {n: unpadded(found[n], i.lengths) for n in ("y", "dx")}
    return whole | {f"d{n}": torch.stack([found[f"d{n}{g}"] for g in range(len(i.ranks))]) for n in "AB"}


def truths(bank: Bank) -> Truths:
    """Of DoRA, and of LoRA, with a bank of any number of adapters."""

    W = bank.W.double()  # one for all adapters

    def call(kind: str, t: dict[str, Tensor]) -> Tensor:
        each = (exact(x, W, t["A"][g], t["B"][g], t["m"][g] if "m" in t else None, S) for g, x in parts(t["x"], bank))
        return torch.cat(list(each))

    return by_formula(call, {n: getattr(bank, n) for n in "xABm"}, bank.dy)


def errors(bank: Bank, truth: Truths, name: str, way: Way) -> dict[str, float]:
    """Relative L2 of the output and of each gradient, of an adapter's own rank."""
    found = {n: t.detach() for n, t in way.both().items()}
    if way.truth is None:
        return {}
    found = as_banks(found, bank) if name == "lorafusion" else found
    if name == "multi_ids":
        found |= {n: found[n][shuffled(len(bank.x)).argsort()] for n in ("y", "dx")}
    for g, r in enumerate(bank.ranks):
        found["dA"][g, r:], found["dB"][g, :, r:] = 0, 0
    return errors_of(found, truth(way.truth))


MIXED = (8, 16, 32, 64, 128, 256)
TOLERANCE = 5e-3
CACHE = 150_000_000  # bytes of weights that no cache holds
TARGETS = {"train": 1.08, "serve": 1.15, "decode": 1.3}  # multi over one; lorafusion over multi: at least 1.2
BANKS = ("multi", "multi_ids")


def kernels(fn: Callable[[], object], device: str) -> dict[str, float]:
    """us of GPU time in one call, by kernel."""
    for _ in range(3):
        fn()
    found = profiled(fn, device, 10)
    count = Counter(each.name for each in found)
    return {f"{count[name] // 10} x {name[:60]}": round(us, 2) for name, us in by_name(found, 10)}


def timed(fns: dict[str, Callable[[], object]], failed: Failures, options) -> tuple[dict[str, float], dict[str, float]]:
    """ms of each way by CUDA graph and, with the host in it, by wall clock."""
    ms = medians_of(fns, options.device, options.runs, failed)
    walls = failed.attempt(fns, lambda name: wall_timer(fns[name], options.device, options.loop_ms))
    return ms, {n: round(v, 5) for n, v in medians(walls, options.runs).items()}


def of_bound(ms: dict[str, float], ranks: list[int], bytes_of_a_rank: int, bytes_per_ms: float) -> dict[str, float]:
    others = (sum(ranks) - sum(ranks) / len(ranks)) * bytes_of_a_rank / bytes_per_ms
    return {n: round(ms[n] / (ms["one"] + others), 3) for n in BANKS if "one" in ms and n in ms}


class Case(NamedTuple):
    """``kind``: train, serve or decode. ``label``: of the ranks."""

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


def rows_of(case: Case, options, bytes_per_ms: float) -> list[dict]:
    """``decode`` has no backward, but weights out of memory."""
    kind, M, K, N, ranks, label = case
    bank = Bank.random(M, K, N, ranks, DTYPES[options.adapter], options.device)
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
        fns = {n: way.both if mode == "fwd_bwd" else way.forward for n, way in ways.items()}
        if mode == "fwd_cold":
            more = max(2, min(8, CACHE // (2 * K * N))) - 1
            banks = [bank, *(Bank.random(M, K, N, ranks, bank.A.dtype, options.device) for _ in range(more))]
            fns = {n: in_turns([build(n, each, options.rival_path) for each in banks]).forward for n in ways}
        facts = {"M": M, "K": K, "N": N, "G": len(ranks), "r": label, "adapter": options.adapter, "mode": mode}
        ms, wall = timed(fns, failed, options)
        bound = of_bound(ms, ranks, (K + N) * bank.A.itemsize, bytes_per_ms)
        pairs = [(n, one) for one in ("one", "multi") for n in ms if (n, one) != ("one", "multi")]
        row = {"kind": kind, **facts, "target": TARGETS[kind], "ms": ms, "wall": wall, "ratio": ratios(ms, pairs)}
        row |= {"of_bound": bound, "error": error, "failed": dict(failed)}
        if options.kernels and mode != "fwd_cold":
            row["kernels"] = {n: kernels(fns[n], options.device) for n in ("one", *BANKS) if n in fns}
        rows.append(row)
    return rows


def cases(options) -> list[Case]:
    """Of each shape what is short first: a limit of time leaves out the last."""
    found = []
    for K, N in options.shapes:
        found.append(Case("decode", options.decode, K, N, [16] * options.decode, "16"))
        found += [Case("serve", M, K, N, [16] * 6, "16") for M in options.serve]
        for label in options.r:
            for G in options.G:
                ranks = [MIXED[g % len(MIXED)] for g in range(G)] if label == "mixed" else [int(label)] * G
                if label != "mixed" or G > 1:
                    found.append(Case("train", options.M, K, N, ranks, label))
    return found


def compile_case(case: Case, adapter: str, device: str) -> None:
    """Everything of fdora once, in a process of its own: the kernels are in Triton's cache then."""
    bank = Bank.random(case.M, case.K, case.N, case.ranks, DTYPES[adapter], device)
    dora_norm(bank.W, bank.A.detach(), bank.B.detach(), s=bank.s)
    for name in ("one", "loop", "multi", "multi_ids"):
        way = build(name, bank)
        way.forward()
        if case.kind != "decode":
            way.both()


OPTIONS = {
    "--shapes": ([(4096, 4096), (4096, 14336)], "K x N"),
    "--M": 8192,
    "--decode": (64, "tokens, each of its own adapter"),
    "--serve": ([200, 700], "tokens of six adapters"),
    "--G": [1, 2, 4, 8, 32],
    "--r": ["16", "mixed"],
    "--adapter": One(DTYPES, "bf16"),
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
        run.attempt(case.name, partial(rows_of, case, options, run.facts.get("bytes_per_ms", math.inf)))
    run.end("one", "loop", "multi", "train", "serve", "decode")


main = Suite(measure, OPTIONS, runs=9, seconds=math.inf, quick={"G": [4, 32], "runs": 3}, ahead=ahead)
