"""One layer's output and gradients in float64, whole, by autograd from the formula. Its norm is a constant, unless
somebody asks for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Outputs = Tensor | list[Tensor] | tuple[Tensor, ...]


def some(size: int, count: int, device) -> Tensor:
    """About ``count`` indices, spread over the whole range."""
    return torch.linspace(0, size - 1, min(size, count), device=device).long()


def norm_of(W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
    blocks = zip(W.split(512), B.split(512), strict=True)
    return torch.cat([(w.double() + s * b.double() @ A.double()).norm(dim=1) for w, b in blocks])


def exact(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor | None, s: float, detach: bool = True) -> Tensor:
    """y of a layer. LoRA is the case ``m=None``, the frozen layer the case s = 0 of that."""
    y = x @ W.double().mT + s * (x @ A.double().mT) @ B.double().mT
    return y if m is None else y * (m.double() / norm_of(W, *((A.detach(), B.detach()) if detach else (A, B)), s))


def named(ys: Outputs) -> dict[str, Tensor]:
    """Outputs by name: y, or y0, y1 and so on where there are several."""
    return {"y": ys} if isinstance(ys, Tensor) else {f"y{i}": each for i, each in enumerate(ys)}


def gradients(call: Callable[[dict[str, Tensor]], Outputs], leaves: dict[str, Tensor], dy: Outputs) -> dict[str, Tensor]:
    """Of this formula in float64, by autograd: outputs and gradients by name."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    found = named(call(leaves))
    grads = torch.autograd.grad(list(found.values()), list(leaves.values()), [t.double() for t in named(dy).values()])
    return {name: y.detach() for name, y in found.items()} | {f"d{n}": d for n, d in zip(leaves, grads, strict=True)}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor], names: Iterable[str] = ()) -> dict[str, float]:
    """Relative L2 of each, or of these; a result that the truth has not is an error."""
    return {name: rel_l2(found[name].detach(), truth[name]) for name in names or found}


def rel_l2(got: Tensor, truth: Tensor) -> float:
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    return ((got.double() - truth).norm() / truth.norm()).item()
