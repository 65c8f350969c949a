"""Compose and delta, for callers that own the matrix products."""

from __future__ import annotations

from torch import Tensor

from fdora._check import FLOATS, check_device, check_dtype, check_s, check_shapes, fail, once
from fdora._dispatch import Backend
from fdora._records import acc_dtype
from fdora.autograd.compose import as_matrix, compose
from fdora.functional.backend import select_backend


def dora_compose(
    base: Tensor, lora: Tensor, g: Tensor, *, s: float, bias: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Scale the adapted pre-activation: ``y = g * (base + s * lora) + bias``.

    Equivalent to the line above in float32 (float64 for float64), rounded once to the dtype of base.

    Args:
      base: (..., N) output of the frozen layer, without bias.
      lora: (..., N) output of ``B(A(x))``, before scaling. The shape of base; any floating dtype.
      g: (N,) float32 (float64 for float64), magnitude over norm, see :func:`dora_scale`.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      bias: (N,), added after g, as PEFT does. torchtune scales the bias by g: leave it in base for that.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (..., N), dtype and device of base. Gradients reach base, lora, g and bias, each in its own dtype.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, or s is not finite.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps base, lora and g for backward. Derivation: ``fdora/eager/compose.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5 and section 4.3.
    """
    return _compose("dora_compose", base, lora, g, s, bias, False, backend)


def dora_delta(base: Tensor, lora: Tensor, g: Tensor, *, s: float, backend: Backend = "auto") -> Tensor:
    """What DoRA adds to the frozen layer's output: ``delta = (g - 1) * base + g * s * lora``.

    Equivalent to the line above in float32 (float64 for float64), rounded once to the dtype of base. Prefer
    :func:`dora_compose` where the whole output is yours to write: adding a rounded delta rounds a second time.

    Args:
      base: (..., N) output of the frozen layer, without bias.
      lora: (..., N) output of ``B(A(x))``, before scaling. The shape of base; any floating dtype.
      g: (N,) float32 (float64 for float64), magnitude over norm, see :func:`dora_scale`.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      backend: "auto", "eager" or "triton".

    Returns:
      (..., N), dtype and device of base. Gradients reach base, lora and g, each in its own dtype.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, or s is not finite.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps base, lora and g for backward. Derivation: ``fdora/eager/compose.py``.
    References: Scaling DoRA, arXiv:2603.22276, eq. 6.
    """
    return _compose("dora_delta", base, lora, g, s, None, True, backend)


def _compose(
    fn: str, base: Tensor, lora: Tensor, g: Tensor, s: float, bias: Tensor | None, delta: bool, backend: Backend
) -> Tensor:
    def check() -> None:
        tensors = {"base": base, "lora": lora, "g": g, "bias": bias}
        check_shapes(fn, {"base": "... N", "lora": "... N", "g": "N", "bias": "N"}, tensors)
        if lora.shape != base.shape:
            have = tuple(lora.shape)
            raise fail(fn, "lora", f"{tuple(base.shape)} (the shape of `base`)", have, "Compute both from the same x.")
        check_device(fn, "base", tensors)
        for arg in ("base", "lora", "bias"):
            check_dtype(fn, arg, tensors[arg], FLOATS, "Cast it to a floating dtype.")
        check_dtype(fn, "g", g, (acc_dtype(base.dtype),), "Keep it as dora_scale(m, c) returns it.")
        check_s(fn, s)

    if once(fn, (base, lora, g, bias), (s,), check):
        from fdora.functional import _sharded

        call = dora_delta if delta else dora_compose
        return _sharded.compose(call, fn, base, lora, g, s, bias, backend=backend)
    choice = select_backend(base, backend=backend)
    y = compose(as_matrix(base), as_matrix(lora), g, bias, s, delta, choice.name)
    return y.reshape(base.shape)
