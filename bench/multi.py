"""Many adapters on one W: dora_linear_multi against one layer's call with all tokens, a loop of calls, and what others do.

    python -m bench.multi --device cuda --json FILE
    python -m bench.multi --device cuda --quick

bf16 x and W, norms given. GPU time by CUDA graph (wall time on a CPU), ways in turns in one run, medians; ``wall`` is wall time
per call with the host in it. ``fwd`` runs under no_grad, ``fwd_bwd`` takes gradients of x and all adapters. Tokens are sorted;
segments have other lengths, and end wherever they end. ``mixed`` ranks are 8 to 256 in turns; ``one`` then has the rank of the
mean, so that it does as much.

    one          dora_linear with all tokens on one adapter: what a call costs when nothing is routed
    loop         dora_linear for each adapter on its tokens, the lengths known on the host
    multi        dora_linear_multi by offsets, multi_ids by the adapter of each token
    grouped_lora LoRA with torch.nn.functional.grouped_mm: no magnitude
    peft_loop    the formula of PEFT's mixed batches: the base for all tokens, then of each adapter's tokens a gather, DoRA's
                 correction and a scatter. As PEFT writes it for one adapter, its norm given

``decode``: 64 tokens of 64 adapters under no_grad, against one call with 64 tokens. ``norm``: all norms of a bank against one.
Every way is compared with float64 before it is timed; one that cannot run is listed with its reason, and a wrong fdora fails
the command at its end. The JSON is rewritten after every case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.attempt import Failures
from bench.clock import anchor_graph, medians, timer, wall_timer
from bench.command import command
from bench.layer import free
from bench.norm_forms import about
from bench.save import save
from bench.table import line, table
from bench.truth import rel_l2, some
from bench.ways import ADAPTERS, BF16
from fdora.functional import dora_linear, dora_linear_multi, dora_norm

S = 2.0
WAYS = ("one", "loop", "grouped_lora", "peft_loop", "multi", "multi_ids")
LORA = ("grouped_lora",)
MIXED = (8, 16, 32, 64, 128, 256)
TOLERANCE = 5e-3
TARGETS = {"train": 1.08, "decode": 1.3, "norm": 1.5}  # multi over one


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
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype).mul_(std)

        G, r = len(ranks), max(ranks)
        x, W, dy = normal(M, K), normal(N, K, std=K**-0.5), normal(M, N)
        A, B = normal(G, r, K, std=K**-0.5, dtype=adapter), normal(G, N, r, std=0.05 * r**-0.5, dtype=adapter)
        for g, own in enumerate(ranks):
            A[g, own:], B[g, :, own:] = 0, 0
        norm = torch.stack([dora_norm(W, a, b, s=S, backend="eager") for a, b in zip(A, B, strict=True)])
        m = (norm * (1 + normal(G, N, std=0.0015, dtype=torch.float32))).to(adapter)
        lengths = lengths_of(M, G)
        ends = torch.tensor(lengths).cumsum(0).to(torch.int32).to(device)
        leaves = (t.requires_grad_() for t in (A, B, m))
        return cls(x.requires_grad_(), W, *leaves, norm, dy, torch.full((G,), S, device=device), ends, lengths, ranks)

    def fresh(self) -> Bank:
        """The same memory under leaves of their own: see bench/group.py."""
        return self._replace(**{n: getattr(self, n).detach().requires_grad_() for n in ("x", "A", "B", "m")})

    def adapter(self, g: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.A[g, : self.ranks[g]], self.B[g, :, : self.ranks[g]], self.m[g]


def lengths_of(M: int, G: int) -> list[int]:
    """Segments of 1/2 to 3/2 of the mean, in an order of their own; one token each where there are as many."""
    weight = [2 + (5 * g) % 7 % 5 for g in range(G)]
    ends = [round(M * sum(weight[: g + 1]) / sum(weight)) for g in range(G)]
    ends = list(range(1, M + 1)) if M == G else ends
    return [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class Way(NamedTuple):
    call: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    dy: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call()

    def both(self) -> dict[str, Tensor]:
        y = self.call()
        grads = torch.autograd.grad(y, list(self.leaves.values()), self.dy)
        return {"y": y, **{f"d{n}": d for n, d in zip(self.leaves, grads, strict=True)}}


def build(name: str, bank: Bank) -> Way:
    i = bank.fresh()
    leaves = {"x": i.x, "A": i.A, "B": i.B, **({} if name in LORA else {"m": i.m})}
    if name == "one":
        own = {n: t.detach().contiguous().requires_grad_() for n, t in zip("ABm", of_mean_rank(i), strict=True)}
        return Way(lambda: dora_linear(i.x, i.W, *own.values(), s=S, norm=i.norm[0]), {"x": i.x, **own}, i.dy)
    if name in ("multi", "multi_ids"):
        ids = torch.repeat_interleave(torch.arange(len(i.ranks)), torch.tensor(i.lengths)).to(i.x.device)
        route = {"offsets": i.offsets} if name == "multi" else {"ids": ids}
        ranks = None if len(set(i.ranks)) == 1 else i.ranks
        return Way(lambda: dora_linear_multi(i.x, i.W, i.A, i.B, i.m, s=i.s, norm=i.norm, ranks=ranks, **route), leaves, i.dy)
    if name == "loop":
        return Way(lambda: loop(i, lambda x, g: dora_linear(x, i.W, *i.adapter(g), s=S, norm=i.norm[g])), leaves, i.dy)
    if name == "peft_loop":
        return Way(lambda: peft_loop(i), leaves, i.dy)
    assert name == "grouped_lora"
    return Way(lambda: grouped_lora(i), leaves, i.dy)


def of_mean_rank(i: Bank) -> tuple[Tensor, Tensor, Tensor]:
    """The first adapters below each other until there is as much of them as one token meets in the mean."""
    r = max(8, round(sum(map(int.__mul__, i.ranks, i.lengths)) / sum(i.lengths) / 8) * 8)
    at = max(range(len(i.ranks)), key=i.ranks.__getitem__)
    return i.A[at, :r], i.B[at, :, :r], i.m[0]


def loop(i: Bank, layer: Callable[[Tensor, int], Tensor]) -> Tensor:
    return torch.cat([layer(x, g) for g, x in enumerate(i.x.split(i.lengths)) if len(x)])


def peft_loop(i: Bank) -> Tensor:
    """(g - 1) base + g s lora of each adapter's tokens, added to the base of all."""
    y = F.linear(i.x, i.W)
    parts = []
    for g, (x, base) in enumerate(zip(i.x.split(i.lengths), y.split(i.lengths), strict=True)):
        A, B, m = i.adapter(g)
        scale = (m / i.norm[g]).to(x.dtype)
        lora = F.linear(F.linear(x, A.to(x.dtype)), B.to(x.dtype))
        parts.append((scale - 1) * base + scale * lora * S)
    return y + torch.cat(parts)


def grouped_lora(i: Bank) -> Tensor:
    A, B = i.A.to(i.x.dtype), i.B.to(i.x.dtype)
    h = F.grouped_mm(i.x, A.mT, offs=i.offsets)
    return F.linear(i.x, i.W) + S * F.grouped_mm(h, B.mT, offs=i.offsets)


def errors(name: str, way: Way, bank: Bank) -> dict[str, float]:
    """Relative L2 of some rows of y and dx, and of the gradients of one adapter, against float64."""
    if name == "one":
        return {}
    found = {n: t.detach() for n, t in way.both().items()}
    want = truth(bank, name in LORA)
    at, g = want.pop("at"), int(want.pop("g"))
    pick = {"y": lambda t: t[at], "dx": lambda t: t[at], "dB": lambda t: t[g, :, : bank.ranks[g]]}
    pick |= {"dA": lambda t: t[g, : bank.ranks[g]], "dm": lambda t: t[g]}
    return {n: float(f"{rel_l2(pick[n](t), want[n]):.2e}") for n, t in found.items()}


def truth(i: Bank, lora: bool) -> dict[str, Tensor]:
    """In float64: samples of rows of each adapter, all of the shortest adapter's gradients."""
    at = some(len(i.x), 64, i.x.device)
    ids = (i.offsets[None] <= at[:, None]).sum(1).tolist()
    g = min((g for g, n in enumerate(i.lengths) if n), key=i.lengths.__getitem__)
    ys, dxs, W = [], [], i.W.double()

    def whole(a: int) -> tuple[Tensor, Tensor]:
        A, B, m = (t.detach().double() for t in i.adapter(a))
        V = W + S * B @ A
        return V, torch.ones_like(m) if lora else m / V.norm(dim=1)

    for t, a in zip(at.tolist(), ids, strict=True):
        V, scale = whole(a)
        ys.append(scale * (V @ i.x[t].detach().double()))
        dxs.append((scale * i.dy[t].double()) @ V)
    begin = sum(i.lengths[:g])
    x, dy = (t.detach()[begin : begin + i.lengths[g]].double() for t in (i.x, i.dy))
    A, B, _ = (t.detach().double() for t in i.adapter(g))
    V, scale = whole(g)
    dz = scale * dy
    found = {"y": torch.stack(ys), "dx": torch.stack(dxs), "dA": S * (dz @ B).mT @ x, "dB": S * dz.mT @ (x @ A.mT)}
    return found | {"dm": (dy * (x @ V.mT)).sum(0) / V.norm(dim=1), "at": at, "g": torch.tensor(g)}


def kernels(fn: Callable[[], object]) -> dict[str, float]:
    """us of GPU time in one call, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            fn()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
    return {f"{e.count // 10} x {e.key[:60]}": round(e.device_time_total / 10, 2) for e in events}


class Timed(NamedTuple):
    """Time of each way by CUDA graph and, with the host in it, by wall clock."""

    ms: dict[str, float]
    wall: dict[str, float]


def timed(fns: dict[str, Callable[[], object]], failed: Failures, options) -> Timed:
    anchor = None if options.device == "cpu" else anchor_graph()
    timers = failed.attempt(fns, lambda name: timer(fns[name], options.device, anchor))
    walls = failed.attempt(fns, lambda name: wall_timer(fns[name], options.device, options.loop_ms))
    return Timed(*({n: round(v, 5) for n, v in medians(t, options.runs).items()} for t in (timers, walls)))


def row_of(kind: str, times: Timed, target: float, **facts) -> dict:
    ms, wall = times
    ratio = {f"{n}/one": round(v / ms["one"], 3) for n, v in ms.items() if n != "one" and "one" in ms}
    ratio |= {f"{n}/multi": round(v / ms["multi"], 3) for n, v in ms.items() if n not in ("one", "multi") and "multi" in ms}
    return {"kind": kind, **facts, "target": target, "ms": ms, "wall": wall, "ratio": ratio}


def train(M: int, K: int, N: int, ranks: list[int], label: str, kind: str, options) -> list[dict]:
    """``decode`` has no backward."""
    bank = Bank.random(M, K, N, ranks, ADAPTERS[options.adapter], options.device)
    failed, error = Failures(), {}

    def prepare(name: str) -> Way:
        way = build(name, bank)
        error[name] = errors(name, way, bank)
        if name in ("multi", "multi_ids", "loop"):
            wrong = ", ".join(f"{key} by {e:.1e}" for key, e in error[name].items() if not e <= TOLERANCE)
            assert not wrong, f"{name} is wrong: {wrong}"
        free(options.device)
        return way

    ways = failed.attempt(options.ways, prepare)
    rows = []
    for mode in ("fwd",) if kind == "decode" else ("fwd", "fwd_bwd"):
        fns = {n: way.forward if mode == "fwd" else way.both for n, way in ways.items()}
        facts = {"M": M, "K": K, "N": N, "G": len(ranks), "r": label, "adapter": options.adapter, "mode": mode}
        rows.append(
            row_of(kind, timed(fns, failed, options), TARGETS[kind], **facts) | {"error": error, "failed": dict(failed)}
        )
    return rows


def norms(K: int, N: int, G: int, r: int, options) -> list[dict]:
    """All norms of a bank at once, one of them, and one after the other."""
    i = Bank.random(8, K, N, [r] * G, ADAPTERS[options.adapter], options.device)
    W, A, B = i.W, i.A.detach(), i.B.detach()
    fns: dict[str, Callable[[], Tensor]] = {
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
    """``kind``: train, decode or norm. ``label``: of the ranks."""

    kind: str
    M: int
    K: int
    N: int
    ranks: list[int]
    label: str

    @property
    def name(self) -> str:
        more = f" {self.label} {len(self.ranks)}" if self.kind == "train" else ""
        return f"{self.kind} {self.K}x{self.N}{more}"

    def run(self, options) -> list[dict]:
        if self.kind == "norm":
            return norms(self.K, self.N, len(self.ranks), self.ranks[0], options)
        return train(self.M, self.K, self.N, self.ranks, self.label, self.kind, options)


def cases(options) -> list[Case]:
    """Of each shape what is short first: a limit of time leaves out the last."""
    shapes = [tuple(map(int, text.split("x"))) for text in options.shapes]
    found = []
    for K, N in shapes:
        found += [Case("decode", options.decode, K, N, [16] * options.decode, "16"), Case("norm", 8, K, N, [16] * 4, "16")]
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
        if case.kind == "train":
            way.both()


def compile_all(found: list[Case], options) -> None:
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for done in [pool.submit(compile_case, case, options.adapter, options.device) for case in found]:
            done.result()


def parse(argv=None):
    parser = command(__doc__, runs=9, seconds=math.inf)
    parser.add_argument("--shapes", default="4096x4096,4096x14336", help="K x N")
    parser.add_argument("--M", type=int, default=8192)
    parser.add_argument("--decode", type=int, default=64, help="tokens, each of its own adapter")
    parser.add_argument("--G", default="1,2,4,8,32")
    parser.add_argument("--r", default="16,mixed")
    parser.add_argument("--adapter", default="bf16", choices=list(ADAPTERS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--quick", action="store_true", help="4 and 32 adapters, three runs")
    parser.add_argument("--loop-ms", type=float, default=20.0, help="of wall time, at least, in one measurement")
    parser.add_argument(
        "--kernels", action="store_true", help="of one and multi: GPU time by kernel, as torch's profiler sees it"
    )
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile all kernels first")
    options = parser.parse_args(argv)
    if options.quick:
        options.G, options.runs = "4,32", 3
    for name in ("shapes", "G", "r", "ways"):
        setattr(options, name, getattr(options, name).split(","))
    options.G = list(map(int, options.G))
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"unknown ways: {', '.join(sorted(unknown))}")
    return options


def main(argv=None):
    options = parse(argv)
    start = perf_counter()
    facts = about(options.device, options.commit, argv)
    print(facts, "\n")
    rows: list[dict] = []
    skipped: list[str] = []
    failed = Failures()
    print(table(["case", *(f"{n} ms" for n in options.ways), "multi/one", "target", "multi's wall", "worst error"], []))
    found = cases(options)
    if options.jobs:
        compile_all(found, options)
        print(f"compiled after {perf_counter() - start:.0f} s", flush=True)
    for case in found:
        name = case.name
        if perf_counter() - start > options.seconds:
            skipped.append(name)
            continue
        for row in failed.attempt([name], lambda _, case=case: case.run(options)).get(name, []):
            worst = max(row["error"].get("multi", {}).values(), default=float("nan"))
            cells = [row["ms"].get(n, "") for n in options.ways] + [row["ratio"].get("multi/one", ""), row["target"]]
            print(line([f"{name}, {row['mode']}", *cells, row["wall"].get("multi", ""), f"{worst:.1e}"]), flush=True)
            for n, seen in row.get("kernels", {}).items():
                print("\n".join([f"  {n}", *(f"    {us:9.2f} us  {kernel}" for kernel, us in seen.items())]), flush=True)
            rows.append(row)
        save(options.json, {"about": facts, "runs": options.runs, "rows": rows, "skipped": skipped, "failed": failed})
        free(options.device)
    if skipped:
        save(options.json, {"about": facts, "runs": options.runs, "rows": rows, "skipped": skipped, "failed": failed})
        print(f"\n{len(skipped)} cases not started in {options.seconds:.0f} s: {skipped}")
    reasons = sorted({f"{n}: {reason}" for each in (failed, *(row["failed"] for row in rows)) for n, reason in each.items()})
    print("".join(f"\nfailed: {reason}" for reason in reasons))
    if mine := [r for r in reasons if r.startswith(("one", "loop", "multi", "train", "decode", "norm"))]:
        raise SystemExit("\n".join(["fdora failed:", *mine]))


if __name__ == "__main__":
    main()
