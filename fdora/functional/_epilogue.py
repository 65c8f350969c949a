"""What may follow a layer inside of its call: gamma, which scales it (LayerScale), and a residual, which is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._check import FLOATS, check_device, check_dtype, check_shapes, check_tensor, fail, name
from fdora._records import acc_dtype


def folded(dtype: torch.dtype, gamma: Tensor | None, m: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """m and bias of gamma times the layer, for an x of this dtype; autograd knows their derivatives."""
    if gamma is None:
        return m, bias
    wide = acc_dtype(dtype)
    by = gamma.to(wide)
    return by * m.to(wide), None if bias is None else by * bias.to(wide)


def loses_inner(dtype: torch.dtype, gamma: Tensor | None, residual: Tensor | None) -> bool:
    """Whether y is no way back to the value before g: beside a residual; in float16, where a small gamma makes y subnormal."""
    return residual is not None or (gamma is not None and dtype == torch.float16)


def check_gamma(fn: str, W: Any, gamma: Tensor | None) -> None:
    if gamma is None:
        return
    tensors = {"W": W, "gamma": gamma}
    check_shapes(fn, {"W": "N K", "gamma": "N"}, tensors)
    check_device(fn, "W", tensors)
    check_dtype(fn, "gamma", gamma, FLOATS)


def check_epilogue(
    fn: str, x: Tensor, W: Any, gamma: Tensor | None, residual: Tensor | None, mode: str, compute: str | None
) -> None:
    check_gamma(fn, W, gamma)
    if mode == "peft":
        arg = "residual" if gamma is None else "gamma"
        have = "a Tensor with dropout_mode='peft'"
        raise fail(fn, arg, "None where dropout reaches the base product", have, "Scale y and add to it yourself.")
    if residual is None:
        return
    check_tensor(fn, "residual", residual)
    if compute is not None:
        raise fail(fn, "residual", "None with compute", "a Tensor", "Add it to y yourself.")
    want = (*x.shape[:-1], W.shape[0])
    if tuple(residual.shape) != want:
        raise fail(fn, "residual", f"{want}, as y is", tuple(residual.shape), "Expand it, or add it to y yourself.")
    check_device(fn, "W", {"W": W, "residual": residual})
    if residual.dtype != x.dtype:
        raise fail(fn, "residual", f"{name(x.dtype)}, as y is", name(residual.dtype), "Cast it, or add it to y yourself.")
