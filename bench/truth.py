"""Samples of one layer's output and gradients in float64: a few rows of y and dx, a few columns for the parameters.

Written from the formulas in chunks, so that the largest layers cost milliseconds and little memory. LoRA is the case
``m=None`` (g = 1), the frozen layer the case s = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOKENS, RANKS, ROWS = 32, 4, 32  # how many rows of y and dx, ranks of dA and dB, elements of dm


def some(size: int, count: int, device) -> Tensor:
    """About ``count`` indices, spread over the whole range."""
    return torch.linspace(0, size - 1, min(size, count), device=device).long()


class Truth:
    """``names`` says what is sampled; ``errors`` takes full tensors of those names and gives relative L2 errors."""

    def __init__(
        self, x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor | None, s: float, dy: Tensor, tokens: int = TOKENS
    ):
        (M, K), N, r = x.shape, W.shape[0], A.shape[0]
        self.t, self.k, self.n = (some(*pair, x.device) for pair in ((M, tokens), (r, RANKS), (N, ROWS)))
        A64, B64 = A.double(), B.double()
        xt, dyt = x[self.t].double(), dy[self.t].double()
        ht = xt @ A64.mT
        y, dx, gs = [], torch.zeros_like(xt), []
        for w, b, d, i in zip(W.split(1024), B64.split(1024), dyt.split(1024, 1), range(0, N, 1024), strict=True):
            w = w.double()
            whole = w + s * b @ A64
            c = whole.norm(dim=1)
            g = torch.ones_like(c) if m is None else m[i : i + 1024].double() / c
            gs.append(g)
            y.append(g * (xt @ w.mT + s * ht @ b.mT))
            dx += (g * d) @ whole
        g = torch.cat(gs)
        Wn, Bn, An = W[self.n].double(), B64[self.n], A64[self.k]
        cn = (Wn + s * Bn @ A64).norm(dim=1)
        dA, dB, dm = An.new_zeros(len(self.k), K), B64.new_zeros(N, len(self.k)), cn.new_zeros(len(self.n))
        for xs, dys in zip(x.split(2048), dy.split(2048), strict=True):
            xs, dz = xs.double(), g * dys.double()
            dA += s * (dz @ B64[:, self.k]).mT @ xs
            dB += s * dz.mT @ (xs @ An.mT)
            dm += (dys[:, self.n].double() * (xs @ Wn.mT + s * (xs @ A64.mT) @ Bn.mT)).sum(0) / cn
        self.samples = {"y": torch.cat(y, 1), "dx": dx, "dA": dA, "dB": dB, "dm": dm}

    def pick(self, name: str, t: Tensor) -> Tensor:
        """What the samples hold of it."""
        at = {"y": self.t, "dx": self.t, "dA": self.k, "dB": (slice(None), self.k), "dm": self.n}
        return t.detach()[at[name]]

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        return {name: rel_l2(self.pick(name, t), self.samples[name]) for name, t in results.items()}


def norm_of(W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
    blocks = zip(W.split(512), B.split(512), strict=True)
    return torch.cat([(w.double() + s * b.double() @ A.double()).norm(dim=1) for w, b in blocks])


def gradients(
    call: Callable[[dict[str, Tensor]], list[Tensor]], leaves: dict[str, Tensor], dys: list[Tensor]
) -> dict[str, Tensor]:
    """Of this formula in float64, by autograd: outputs and gradients by name."""
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    ys = call(exact)
    grads = torch.autograd.grad(ys, list(exact.values()), [dy.double() for dy in dys])
    return {f"y{i}": y.detach() for i, y in enumerate(ys)} | {f"d{n}": d for n, d in zip(exact, grads, strict=True)}


def rel_l2(got: Tensor, truth: Tensor) -> float:
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    return ((got.double() - truth).norm() / truth.norm()).item()
