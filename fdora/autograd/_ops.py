"""The table of backends, and what every Function here shares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from fdora import eager

# name -> package with the modules norm, compose, linear and merge. Filled at import: a lazy import inside a forward
# breaks torch.compile(fullgraph=True).
OPS: dict[str, ModuleType] = {"eager": eager}


def autocast_off(t: Tensor) -> AbstractContextManager[None]:
    """Ops choose their own precision; an active autocast would round their float32 products to half."""
    device = t.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def no_second_derivative(op: str) -> NotImplementedError:
    return NotImplementedError(
        f"fdora: second derivatives of {op} are not implemented. "
        "Take them through the plain formula: g * (x @ W.T + s * (x @ A.T) @ B.T) + bias."
    )


def only(grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The gradients that were asked for: vmap cannot carry a None out of a Function."""
    return tuple(d for d in grads if d is not None)


def spread(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
    """Undo :func:`only`."""
    rest = iter(grads)
    return [next(rest) if need else None for need in needs]
