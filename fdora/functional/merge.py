"""Fold an adapter into its weight and take it out again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._check import FdoraError, check_dtype
from fdora._dispatch import Backend
from fdora._torch import detached
from fdora.autograd._ops import OPS, autocast_off
from fdora.autograd.norm import is_real, row_norm, scale
from fdora.functional.backend import select_backend
from fdora.functional.norm import WIDE, check_weights
from fdora.quant import QuantWeight


@torch.no_grad()
def dora_merge(
    W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor, *, s: float, norm: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """One weight that does what the adapted layer does: ``W' = g * (W + s * B @ A)``, ``g = m / ||W + s * B @ A||``.

    ``F.linear(x, W', bias)`` equals ``dora_linear(x, W, A, B, m, s=s, bias=bias)`` up to rounding.

    Args:
      W: (N, K) weight, float16, bfloat16, float32 or float64, or a :class:`fdora.quant.QuantWeight`; the result is dense.
      A: (r, K), float32 or the dtype of W.
      B: (N, r), float32 or the dtype of W.
      m: (N,), float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r.
      norm: (N,) from :func:`dora_norm`; None computes it. Compute and keep it when you mean to unmerge.
      backend: "auto", "eager" or "triton".

    Returns:
      (N, K), dtype and device of W; a new tensor, detached.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, or s is not finite.

    Memory: the result and one block of rows (Triton: the result alone); keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    check_merge("dora_merge", W, A, B, m, s, norm)
    choice = select_backend(W, backend=backend)
    W, A, B, m, norm = detached(W, A, B, m, norm)
    c = row_norm(W, A, B, None, s, None, True, choice.name) if norm is None else norm
    dense = W.dequantize() if isinstance(W, QuantWeight) else W
    with autocast_off(dense):
        return OPS[choice.name].merge_fwd(dense, A, B, m, c, s)


@torch.no_grad()
def dora_unmerge(W: Tensor, A: Tensor, B: Tensor, m: Tensor, *, s: float, norm: Tensor, backend: Backend = "auto") -> Tensor:
    """Undo :func:`dora_merge`: ``W = W' / g - s * B @ A`` with ``g = m / norm``.

    Args:
      W: (N, K) the merged weight W'.
      A, B, m, s: as they were when it was merged.
      norm: (N,) ``dora_norm(W, A, B, s=s)`` of the weight *before* the merge: a merged row has norm m, c is gone from it.
      backend: "auto", "eager" or "triton".

    Returns:
      (N, K), dtype and device of W. Equal to the weight before up to the rounding of the merged one: to have it back bit
      for bit, keep a copy.

    Raises:
      FdoraError: as :func:`dora_merge`; or a row has m = 0, so that the merge wiped it out. In traced or mapped code,
        where values cannot be looked at, such a row comes back as NaN instead.

    Memory: the result and one block of rows (Triton: the result alone); keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5, solved for W.
    """
    fn = "dora_unmerge"
    check_merge(fn, W, A, B, m, s, norm)
    W, A, B, m, norm = detached(W, A, B, m, norm)
    wiped = (scale(m, norm) == 0) & (norm > 0)
    lost = wiped.nonzero().flatten().tolist() if is_real(wiped) else []
    if lost:
        raise FdoraError(
            f"fdora.{fn}: `m` must not be 0 in a row that is to come back, got 0 in row {lost[0]}"
            f"{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}. The merge wiped it out: restore it from a copy."
        )
    choice = select_backend(W, backend=backend)
    with autocast_off(W):
        return OPS[choice.name].unmerge_fwd(W, A, B, m, norm, s)


def check_merge(fn: str, W: Any, A: Tensor, B: Tensor, m: Tensor, s: float, norm: Tensor | None) -> None:
    check_weights(fn, {"W": W, "A": A, "B": B, "m": m, "norm": norm}, s)
    when = " before the merge" if fn == "dora_unmerge" else ""
    check_dtype(fn, "norm", norm, WIDE, f"Keep it as dora_norm(W, A, B, s=s) returned it{when}.")
