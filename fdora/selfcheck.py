"""Does the layer compute the right thing on this device? One forward and backward against the formula in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fdora.functional import dora_linear, dora_norm

M, K, N, R, S = 96, 160, 224, 8, 2.0
EPS_NORM = 16 * torch.finfo(torch.float32).eps  # a norm is one float32 sum of K squares, whatever the dtype of W


def check(device: torch.device | str, dtype: torch.dtype, tokens: int = M) -> dict[str, tuple[float, float]]:
    """``{"c": (error, limit), "y": ..., "dx": ..., "dA": ..., "dB": ..., "dm": ...}``: relative errors, ``||got - truth|| /
    ||truth||`` with the truth in float64 on the CPU.

    The limit of y and of the gradients is twice what the formula loses when plain torch computes it in the same dtype on the
    same device, plus one rounding; that of ``c = dora_norm(...)`` is a few roundings of float32. Products run at torch's
    highest float32 precision. Torch's random state is left alone.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shapes = {"x": (tokens, K), "A": (R, K), "B": (N, R), "W": (N, K), "dy": (tokens, N)}
        given = {n: torch.randn(*shape, dtype=torch.float64) for n, shape in shapes.items()}
        spread = 1 + 0.05 * torch.randn(N, dtype=torch.float64)
    for name, scale in {"A": K**-0.5, "B": 0.1 * R**-0.5, "W": K**-0.5}.items():
        given[name] *= scale
    given["m"] = spread * _norm(given["W"], given["A"], given["B"])
    given = {n: t.to(dtype) for n, t in given.items()}
    here = {n: t.to(device) for n, t in given.items()}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        c = dora_norm(here["W"], here["A"], here["B"], s=S)
        got = {"c": c} | _gradients(here, lambda x, W, A, B, m: dora_linear(x, W, A, B, m, s=S, norm=c))
        plain = _gradients(here, _formula)
    finally:
        torch.set_float32_matmul_precision(precision)
    exact = {n: t.double() for n, t in given.items()}
    truth = {"c": _norm(exact["W"], exact["A"], exact["B"])} | _gradients(exact, _formula)
    limits = {n: 2 * _error(t, truth[n]) + torch.finfo(dtype).eps for n, t in plain.items()}
    return {n: (_error(t, truth[n]), limits.get(n, EPS_NORM)) for n, t in got.items()}


def _norm(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return torch.linalg.vector_norm(W + S * (B @ A), dim=1)


def _formula(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor) -> Tensor:
    return (m / _norm(W, A, B).detach()) * (x @ W.T + S * (x @ A.T) @ B.T)


def _gradients(t: dict[str, Tensor], layer) -> dict[str, Tensor]:
    leaves = {n: t[n].detach().clone().requires_grad_() for n in ("x", "A", "B", "m")}
    y = layer(leaves["x"], t["W"], leaves["A"], leaves["B"], leaves["m"])
    grads = torch.autograd.grad(y, list(leaves.values()), t["dy"])
    return {"y": y.detach()} | {f"d{n}": d for n, d in zip(leaves, grads, strict=True)}


def _error(got: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(got.cpu().double() - truth) / torch.linalg.vector_norm(truth)).item()
