"""Convolutions: torch's own, and its gradients of them; then compose."""

from __future__ import annotations

import torch
from torch import Tensor

from fdora._records import Conv, NormOf, acc_dtype
from fdora.autograd.compose import compose
from fdora.autograd.norm import row_norm, scale
from fdora.eager.conv import halves as halves
from fdora.eager.conv import planes, unplanes
from fdora.eager.conv import rows as rows


def conv(
    x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, bias: Tensor | None, s: float, how: Conv, backend: str
) -> Tensor:
    """x (L, C, space...) -> y (L, O, space...)."""
    base, lora = halves(x, W, A, B, how)
    return unplanes(compose(*composed(base, lora, m, c), bias, s, False, backend), base)


def composed(base: Tensor, lora: Tensor, m: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The halves as compose takes them, and g."""
    g = scale(m, c.to(acc_dtype(base.dtype)))
    flat = planes(base)
    return flat, lora.movedim(1, -1).flatten(0, -2) if flat.dim() == 2 else lora.flatten(2), g


def conv_norm(W: Tensor, A: Tensor, B: Tensor, s: float, how: Conv, backend: str) -> Tensor:
    """(O,), detached."""
    with torch.no_grad():
        return row_norm(NormOf(*rows(W, A, B, how), s), backend)
