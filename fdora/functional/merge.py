"""Fold an adapter into its weight and take it out again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import FdoraError, check_left_out, check_weights, fail, is_sharded
from fdora._dispatch import Backend
from fdora._records import NormOf
from fdora._torch import detached
from fdora.autograd import quant
from fdora.autograd._ops import OPS, autocast_off
from fdora.autograd.norm import is_real, row_norm, scale
from fdora.functional._epilogue import check_gamma, folded
from fdora.functional.backend import select_backend
from fdora.functional.layer import DoraLayer
from fdora.quant import QuantWeight
from fdora.quant.quantize import NAMES, quantizes


@torch.no_grad()
def dora_merge(
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    gamma: Tensor | None = None,
    norm: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """One weight that does what the adapted layer does: ``W' = g * (W + s * B @ A)``, ``g = m / ||W + s * B @ A||``.

    ``F.linear(x, W', bias)`` equals ``dora_linear(x, W, A, B, m, s=s, bias=bias)`` up to rounding; with a gamma,
    ``F.linear(x, W', gamma * bias)`` equals ``dora_linear(x, W, A, B, m, s=s, bias=bias, gamma=gamma)``. A DTensor W gives
    one that lies as it does.

    Args:
      W: (N, K) weight, float16, bfloat16, float32 or float64, or a :class:`fdora.quant.QuantWeight`; the result is dense.
      A: (r, K), float32 or the dtype of W.
      B: (N, r), float32 or the dtype of W.
      m: (N,), float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r.
      gamma: (N,), multiplies the rows of W' before they are rounded. To unmerge, pass ``gamma * m`` in float32 for m.
      norm: (N,) from :func:`dora_norm`; None computes it. Compute and keep it when you mean to unmerge.
      backend: "auto", "eager" or "triton".

    Returns:
      (N, K), dtype and device of W; a new tensor, detached.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, or s is not finite.

    Memory: the result and one block of rows (Triton: the result alone); keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    fn = "dora_merge"
    if is_sharded(W, A, B, m, norm):
        from fdora.functional import _sharded

        check_left_out(fn, {"gamma": gamma is not None})
        return _sharded.merge(dora_merge, fn, DoraLayer(W, A, B, m, s, None, norm), backend)
    check_merge(fn, W, A, B, m, s, norm)
    check_gamma(fn, W, gamma)
    choice = select_backend(W, backend=backend)
    m, _ = folded(W.dtype, gamma, m, None)
    W, A, B, m, norm = detached(W, A, B, m, norm)
    c = row_norm(NormOf(W, A, B, s), choice.name) if norm is None else norm
    dense = W.dequantize() if isinstance(W, QuantWeight) else W
    with autocast_off(dense):
        return OPS[choice.name].merge_fwd(dense, A, B, m, c, s)


class MergedWeight(NamedTuple):
    """A merged weight in its quantised format, and the relative error of that: what :func:`dora_merge_quantized` returns."""

    W: QuantWeight
    error: Tensor
    """() float32: what quantising the merged weight again lost of it, relative, in the Frobenius norm."""


@torch.no_grad()
def dora_merge_quantized(
    W: QuantWeight, A: Tensor, B: Tensor, m: Tensor, *, s: float, norm: Tensor | None = None, backend: Backend = "auto"
) -> MergedWeight:
    """:func:`dora_merge` in the format of W: ``W' ~ g * (W + s * B @ A)``, each value the nearest code, and the error of that.

    W lies on codes already: an adapter that moves it by less than half of their distance is rounded away, and the error is then
    as large as the move, ``||dora_merge(...) - W|| / ||W||``. It grows up to what the format loses of any weight (9 % for nf4,
    3 % for fp8, 1 % for int8). Keep the adapter apart, or the merged weight dense, where that is too much.

    Args:
      W: (N, K) :class:`fdora.quant.QuantWeight` of kind nf4, fp4, mxfp4, nvfp4, int8 or fp8.
      A: (r, K), float32 or the dtype of W.
      B: (N, r), float32 or the dtype of W.
      m: (N,), float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r.
      norm: (N,) from :func:`dora_norm`; None computes it.
      backend: "auto", "eager" or "triton".

    Returns:
      ``MergedWeight(W, error)``: a QuantWeight of the kind, shape, dtype, groups and facts of W, with new codes and scales; and
      ``||W' - g (W + s B A)|| / ||g (W + s B A)||`` as a float32 tensor without axes, on the device of W.

    Raises:
      FdoraError: W is dense, or of a kind that :func:`fdora.quant.quantize` does not make; else as :func:`dora_merge`.

    Memory: the result, and float32 copies of 64 MB of W at a time; no dense (N, K) tensor. Keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5; those of :func:`fdora.quant.quantize`.
    """
    fn = "dora_merge_quantized"
    if not isinstance(W, QuantWeight):
        raise fail(fn, "W", "a QuantWeight", f"a {type(W).__name__}", "Pass dora_merge(...) to fdora.quant.quantize.")
    check_merge(fn, W, A, B, m, s, norm)
    if not quantizes(W.spec):
        remedy = "Merge it with dora_merge, and quantise the result with the library that made W."
        raise fail(fn, "W", f"of kind {NAMES}, as quantize makes them", f"{W.kind} of {W.facts}", remedy)
    choice = select_backend(W, backend=backend)
    A, B, m, norm = detached(A, B, m, norm)
    c = row_norm(NormOf(W, A, B, s), choice.name) if norm is None else norm
    with autocast_off(A):
        return MergedWeight(*quant.merge(W, A, B, m, c, s, choice.name))


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
    if is_sharded(W, A, B, m, norm):
        from fdora.functional import _sharded

        return _sharded.merge(dora_unmerge, fn, DoraLayer(W, A, B, m, s, None, norm), backend)
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
    if fn == "dora_unmerge" and isinstance(W, QuantWeight):
        raise fail(fn, "W", "a tensor", "a QuantWeight", "Quantising the merged weight was for good: keep the one before.")
    if fn == "dora_unmerge" and norm is None:
        raise fail(fn, "norm", "that of the weight before the merge", "None", "Keep dora_norm(W, A, B, s=s) when you merge.")
    when = " before the merge" if fn == "dora_unmerge" else ""
    remedy = f"Keep it as dora_norm(W, A, B, s=s) returned it{when}."
    check_weights(fn, {"W": W, "A": A, "B": B, "m": m, "norm": norm}, s, remedy)
