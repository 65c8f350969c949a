"""DoRA as a server computes it: the kernels of one layer, beside those that vLLM runs for LoRA.

    python -m bench.serve --device cuda --jobs 16 --rival-path FOLDER --json FILE

bf16, under no_grad, GPU time by CUDA graph (wall time on a CPU, where plain torch stands in for vLLM's kernels), ways in turns
in one run, medians. Tokens are in random order, every one has an adapter, and every adapter is of DoRA. So many copies of a
layer are called in turn that no cache holds their weights, as in a model.

    base       x W^T by torch
    vllm_lora  the same, then vLLM's kernels for LoRA, in place (bench/checkouts.py); its tables of the tokens are made before
    plugin     x W^T and vLLM's shrink, then fdora's pass in the place of its expand: what the plug-in for vLLM makes of it
    idle       the same while no slot holds DoRA: what it costs LoRA's requests, which get the bits of vLLM's expand
    multi_ids  dora_linear_multi by the adapter of each token, the norm given

``serve``: one layer. ``load``: g of all linears of a model, as the plug-in computes it when an adapter is loaded: one layer's
are timed, W out of memory, and counted for all. Every way is compared with float64 before it is timed; one that cannot run is
listed with its reason, and a wrong fdora fails the command at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkouts import RIVAL_PATH, Slots, vllm_lora
from bench.clock import medians_of
from bench.multi import CACHE, Bank, lengths_of
from bench.suite import Some, Suite, shapes
from bench.truth import norm_of, rel_l2, some
from bench.ways import BF16, S, Way, away, checked, in_turns, ratios
from fdora.functional import dora_linear_multi
from fdora.functional.opaque import scale_slots
from fdora.integrations._vllm import g as plug_in

WAYS = ("base", "vllm_lora", "plugin", "idle", "multi_ids")
TOLERANCE = 5e-3
TARGETS = {"serve": 1.05, "load": 8.0}  # plugin over vllm_lora; ms


class Served(NamedTuple):
    """A layer with adapters in slots, as vLLM stacks them: s is in B. ``ids``: the slot of each token."""

    x: Tensor
    W: Tensor
    A: Tensor
    B: Tensor
    m: Tensor
    norm: Tensor
    ids: Tensor

    @classmethod
    def random(cls, M: int, K: int, N: int, r: int, G: int, device: str) -> Served:
        x, W, A, B, m, norm = (t.detach() for t in Bank.random(M, K, N, [r] * G, BF16, device)[:6])
        return cls(x, W, A, S * B, m, norm, torch.zeros(M, dtype=torch.int64, device=device)).part(M, G)

    def part(self, M: int, G: int) -> Served:
        """Some tokens, of some adapters."""
        ids = torch.repeat_interleave(torch.arange(G), torch.tensor(lengths_of(M, G)))
        mixed = ids[torch.randperm(M, generator=torch.Generator().manual_seed(0))].to(self.x.device)
        return self._replace(x=self.x[:M], ids=mixed, **{n: getattr(self, n)[:G] for n in ("A", "B", "m", "norm")})


def build(name: str, i: Served, rival_path) -> Way:
    if name == "base":
        return Way(lambda: F.linear(i.x, i.W), None)
    if name == "multi_ids":
        s = torch.ones(len(i.A), device=i.x.device)
        return Way(lambda: dora_linear_multi(i.x, i.W, i.A, i.B, i.m, s=s, ids=i.ids, norm=i.norm), None)
    slots = slots_of(i, rival_path)
    last = slots.expand if name == "vllm_lora" else our_pass(i, slots, name == "plugin")

    def forward() -> Tensor:
        y = F.linear(i.x, i.W)
        last(slots.shrink(i.x), y)
        return y

    return Way(forward, None)


def slots_of(i: Served, rival_path) -> Slots:
    if i.x.device.type != "cpu" or rival_path:
        return vllm_lora(rival_path, i.A, i.B, i.ids)

    def add(h: Tensor, y: Tensor) -> None:
        y += lora_of(i, h[0].to(y.dtype).float(), i.ids).to(y.dtype)

    return Slots(lambda x: torch.einsum("tk,trk->tr", x.float(), i.A[i.ids].float())[None], add, [])


def our_pass(i: Served, slots: Slots, dora: bool) -> Callable[[Tensor, Tensor], None]:
    g, N = i.m.float() / i.norm, i.B.shape[1]
    holds, ends = (torch.tensor(each, dtype=torch.int32, device=g.device) for each in ([int(dora)] * len(g), [0, N // 16]))
    facts = {"tables": slots.tables, "idle": torch.tensor([not dora]), "no_lora": None}
    return lambda h, y: scale_slots(y, g, holds, None, i.ids, low=[h, i.B, ends], **facts)


def lora_of(i: Served, h: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("tr,tnr->tn", h, i.B[ids].to(h.dtype))


def error_of(name: str, way: Way, i: Served, rival_path) -> dict[str, float]:
    """Relative L2 of some rows; of ``idle`` also how much of y has other bits than vLLM's expand gives it."""
    rows = some(len(i.x), 16, i.x.device)
    x, ids = i.x[rows].double(), i.ids[rows]
    y = torch.cat([x @ W.double().mT for W in i.W.split(1024)], 1)
    if name != "base":
        y += lora_of(i, torch.einsum("tk,trk->tr", x, i.A[ids].double()), ids)
    if name in ("plugin", "multi_ids"):
        y *= (i.m.double() / i.norm)[ids]
    error = {"y": rel_l2(way.forward()[rows], y)}
    if name == "idle":
        slots = slots_of(i, rival_path)
        h, theirs, mine = slots.shrink(i.x), F.linear(i.x, i.W), F.linear(i.x, i.W)
        slots.expand(h, theirs)
        our_pass(i, slots, False)(h, mine)
        error["bits"] = (theirs != mine).double().mean().item()
    return error


@torch.no_grad()
def serve(case: Case, layers: list[Served], options) -> list[dict]:
    parts = [layer.part(case.M, case.G) for layer in layers]
    ways, error, failed, *_ = checked(
        options.ways,
        lambda name: build(name, parts[0], options.rival_path),
        lambda name, way: error_of(name, way, parts[0], options.rival_path),
        TOLERANCE,
        options.device,
        ("plugin", "idle", "multi_ids"),
    )
    fns = {name: in_turns([build(name, part, options.rival_path) for part in parts]).forward for name in ways}
    ms = medians_of(fns, options.device, options.runs, failed)
    ours = [name for name in ("plugin", "multi_ids") if name in ms]
    row = {"kind": "serve", **case._asdict(), "target": TARGETS["serve"], "ms": ms}
    row |= {"ratio": ratios(ms, [(name, "vllm_lora") for name in WAYS]), "faster": min(ours, key=ms.__getitem__, default="")}
    return [row | {"error": error, "failed": dict(failed)}]


class Case(NamedTuple):
    M: int
    K: int
    N: int
    r: int
    G: int


def cases(options) -> list[tuple[tuple[int, int, int], list[Case]]]:
    """Of each shape and rank, all numbers of tokens and adapters."""
    some = [(M, G) for M in options.tokens for G in options.adapters if G <= M]
    each = [(K, N, r) for K, N in options.shapes for r in options.r]
    return [((K, N, r), [Case(M, K, N, r, G) for M, G in some]) for K, N, r in each]


def load(options) -> list[dict]:
    """g of one layer's linears, each with the rows of one or several projections."""
    fns, r = [], options.load_r
    for i, (K, *Ns) in enumerate(options.load):
        generator = torch.Generator(options.device).manual_seed(i)
        W = torch.randn(sum(Ns), K, generator=generator, device=options.device, dtype=BF16).mul_(K**-0.5)
        each = [away(part, r, BF16, generator) for part in W.split(Ns)]
        fns.append(g_of(W, each))
        truth = torch.cat([m.double() / norm_of(w, A, B, S) for w, (A, B, m, _) in zip(W.split(Ns), each, strict=True)])
        error = rel_l2(fns[-1](), truth)
        assert error < 1e-5, f"g is wrong: by {error:.1e}"
    ms = medians_of({"one layer": lambda: [fn() for fn in fns]}, options.device, options.runs)
    ms["model"] = round(options.layers * ms["one layer"], 4)
    return [{"kind": "load", "r": r, "layers": options.layers, "target": TARGETS["load"], "ms": ms}]


def g_of(W: Tensor, adapters: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Callable[[], Tensor]:
    """The plug-in's own function, on what stands in for vLLM's layer; its magnitudes are on the device."""
    As, Bs, ms = ([each[n] for each in adapters] for n in range(3))
    module = SimpleNamespace(
        lora_a_stacked=[A[None, None] for A in As], lora_b_stacked=[S * B[None, None] for B in Bs], tp_size=1
    )
    m = [torch.stack([each.float(), torch.ones_like(each, dtype=torch.float32)], 1) for each in ms]
    there = {"parts_of": lambda module: [(slice(0, W.shape[1]), W)], "own_part": lambda module, m: m}

    def call() -> Tensor:
        with mock.patch.multiple(plug_in, **there):
            return plug_in.g_of(module, 0, m)

    return call


def compile_case(case: Case, device: str, rival_path) -> None:
    M, K, N, r, G = case
    layer = Served.random(M, K, N, r, G, device)
    for name in WAYS:
        with torch.no_grad():
            build(name, layer, rival_path).forward()


OPTIONS = {
    "--shapes": ([(4096, 4096), (4096, 14336), (14336, 4096), (5120, 27648)], "K x N"),
    "--r": [16, 64],
    "--tokens": [1, 8, 64, 512, 8192],
    "--adapters": ([1, 8, 64], "never more than there are tokens"),
    "--ways": Some(WAYS),
    **RIVAL_PATH,
    "--load": dict(
        type=shapes,
        default=[(4096, 4096, 1024, 1024), (4096, 4096), (4096, 14336, 14336), (14336, 4096)],
        help="the linears of a layer of that model, Llama-3.1-8B by default: K x N of each projection",
    ),
    "--layers": (32, "of it"),
    "--load-r": 64,
}


def ahead(options):
    return compile_case, [(case, options.device, options.rival_path) for _, each in cases(options) for case in each]


def measure(run):
    options = run.options
    run.set(failed=run.failed)
    run.attempt("load", partial(load, options))
    for (K, N, r), each in run.cases(cases(options)):
        copies = max(1, math.ceil(CACHE / (2 * K * N))) if options.device != "cpu" else 1
        M, G = max(case.M for case in each), max(case.G for case in each)
        layers = [Served.random(M, K, N, r, G, options.device) for _ in range(copies)]
        for case in each:
            run.attempt("serve", partial(serve, case, layers, options))
    run.end("plugin", "idle", "multi_ids", "serve", "load")


main = Suite(measure, OPTIONS, runs=9, seconds=math.inf, ahead=ahead)
