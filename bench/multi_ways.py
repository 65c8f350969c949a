"""The ways of bench.multi: a bank of adapters, tokens for each, and every call that serves them, checked against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkouts import lorafusion_multi, padded, unpadded
from bench.truth import errors as errors_of
from bench.truth import exact, gradients
from bench.ways import BF16, S, Truths, Way, away, differentiated
from fdora.functional import dora_linear, dora_linear_multi

WAYS = ("frozen", "one", "loop", "grouped_lora", "lorafusion", "peft_loop", "multi", "multi_ids")
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
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=BF16).mul_(std)

        G, x, W, dy = len(ranks), normal(M, K), normal(N, K, std=K**-0.5), normal(M, N)
        A, B, m, norm = away(W.expand(G, N, K), max(ranks), adapter, generator, ranks)
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


def build(name: str, bank: Bank, rival_path: Sequence[Path] = ()) -> Way:
    i = bank.fresh()
    truth = "lora" if name in LORA else "dora"
    leaves = {n: getattr(i, n) for n in ("xAB" if name in LORA else "xABm")}
    if name == "frozen":
        return differentiated(lambda: F.linear(i.x, i.W), {"x": i.x}, i.dy, None)
    if name == "one":
        own = {n: t.detach().contiguous().requires_grad_() for n, t in zip("ABm", of_mean_rank(i), strict=True)}
        return differentiated(lambda: dora_linear(i.x, i.W, *own.values(), s=S, norm=i.norm[0]), {"x": i.x, **own}, i.dy, None)
    if name in ("multi", "multi_ids"):
        route, x, dy = {"offsets": i.offsets}, i.x, i.dy
        if name == "multi_ids":
            ids = torch.repeat_interleave(torch.arange(len(i.ranks)), torch.tensor(i.lengths))
            some = shuffled(len(ids))
            route, x, dy = {"ids": ids[some].to(x.device)}, x.detach()[some].requires_grad_(), dy[some]
        how = {"s": i.s, "norm": i.norm, "ranks": None if len(set(i.ranks)) == 1 else i.ranks, **route}
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

    @cache
    def of(kind: str) -> dict[str, Tensor]:
        def call(t: dict[str, Tensor]) -> Tensor:
            each = (exact(x, W, t["A"][g], t["B"][g], t["m"][g] if "m" in t else None, S) for g, x in parts(t["x"], bank))
            return torch.cat(list(each))

        return gradients(call, {n: getattr(bank, n) for n in ("xABm" if kind == "dora" else "xAB")}, bank.dy)

    return of


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
