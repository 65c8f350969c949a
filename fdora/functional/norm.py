"""The row norm, the squared norm of the base that it can reuse, and the scale g."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from torch import Tensor

from fdora._check import (
    FLOATS,
    WIDE,
    Weight,
    check_device,
    check_dtype,
    check_frozen,
    check_shapes,
    check_weights,
    fail,
    is_sharded,
    key_of,
    passed,
    remember,
)
from fdora._dispatch import Backend
from fdora._records import NormOf
from fdora._torch import PLAIN
from fdora.autograd.norm import base_sqnorm as _base_sqnorm
from fdora.autograd.norm import guarded_norm, row_norm, row_sqnorm, scale, smallest_bytes_of
from fdora.autograd.norm import kept_norms as kept_norms
from fdora.autograd.sharded import sharded_guarded_norm, sharded_norm
from fdora.functional.backend import select_backend
from fdora.functional.bank import is_stack, norm_of_bank, norm_of_experts
from fdora.functional.norm_state import NormState, ShardNormState, check_one_group, check_state
from fdora.quant import QuantWeight


@overload
def dora_norm(
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    *,
    s: float | Tensor | Sequence[float],
    norm_axis: int = ...,
    base_sqnorm: Tensor | None = ...,
    detach: bool = ...,
    max_bytes: int | None = ...,
    state: None = ...,
    squared: bool = ...,
    group: Any = ...,
    backend: Backend = ...,
) -> Tensor: ...
@overload
def dora_norm(
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    *,
    s: float,
    norm_axis: int = ...,
    base_sqnorm: Tensor | None = ...,
    detach: bool = ...,
    max_bytes: int | None = ...,
    state: NormState,
    squared: bool = ...,
    group: None = ...,
    backend: Backend = ...,
) -> NormState: ...
@overload
def dora_norm(
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    *,
    s: float,
    norm_axis: int = ...,
    base_sqnorm: Tensor | None = ...,
    detach: bool = ...,
    max_bytes: int | None = ...,
    state: NormState | ShardNormState,
    squared: bool = ...,
    group: Any,
    backend: Backend = ...,
) -> ShardNormState: ...
def dora_norm(
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    *,
    s: Any,
    norm_axis: int = 1,
    base_sqnorm: Tensor | None = None,
    detach: bool = True,
    max_bytes: int | None = None,
    state: NormState | ShardNormState | None = None,
    squared: bool = False,
    group: Any = None,
    backend: Backend = "auto",
) -> Tensor | NormState | ShardNormState:
    """Row norm of the adapted weight: ``c = ||W + s * B @ A||`` along K (with ``norm_axis=0`` along N).

    Equivalent to ``torch.linalg.vector_norm(W.float() + s * B.float() @ A.float(), dim=1)`` without an (N, K) temporary.
    A and B change once per optimizer step: compute c once and pass it to every call in between as ``norm=c``. Where no one
    can say when they change, keep a state and ask every time: the bits of A, B and s decide, so c is never stale. Of DTensors,
    W in whatever rows or columns, c is one: a state of them is a :class:`ShardNormState`.

        state = dora_norm_state(W)
        state = dora_norm(W, A, B, s=s, state=state)  # computes
        state = dora_norm(W, A, B, s=s, state=state)  # reads A and B, not W
        y = dora_linear(x, W, A, B, m, s=s, norm=state.c)

    Args:
      W: (N, K) frozen weight, float16, bfloat16, float32 or float64; any strides. Or a :class:`fdora.quant.QuantWeight`, whose
        norm is that of the weight before it is rounded to W.dtype; never more than some rows of it are dense (an opaque one is
        made once, as a whole). Or (E, N, K), a stack of experts with A (E, r, K), B (E, N, r) and one s: all their norms in one
        launch, of a QuantWeight (E N, K) in two for each. It takes backend beside them. Kernels take 65,535 of either.
      A: (r, K), float32 or the dtype of W. Or (G, r, K), a bank of adapters: one pass over W gives the norms of all. Of the
        rest a bank takes s, a tensor (G,) or G numbers, and backend.
      B: (N, r), float32 or the dtype of W; (G, N, r) in a bank.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      norm_axis: the axis that is summed away. 1 is DoRA's: c_n of each output row, ``y = g * (...)``. 0 is LyCORIS's default:
        c_k of each input column, where g scales the input instead, ``y = (g * x) @ W.T + s * ((g * x) @ A.T) @ B.T + bias``.
        Columns are the rows of W.T: base_sqnorm and state are then made from W.T, and shards lie along N.
      base_sqnorm: (N,) from :func:`dora_base_sqnorm`, when W is frozen and you keep it. c is the same with or without it.
      detach: True treats c as a constant, as DoRA does to save memory. False lets gradients reach A and B through c.
      max_bytes: most workspace in bytes beside the inputs; None is 12 MiB on a CPU and 64 MiB elsewhere. Under vmap it
        holds for each mapped element.
      state: None, or what the call before returned for this W; :func:`dora_norm_state` starts. The kernels decide on the
        GPU without waiting for it; eager code saves work on a CPU only. Nothing is mutated: a captured CUDA graph must end
        with ``for a, b in zip(old, new): a.copy_(b)``. W is not looked at: another W, or one that changed, needs a new
        state. Only with detach=True.
      squared: True returns ``c ** 2`` of these columns. Only with detach=True, without a state or a group.
      group: None, or the torch.distributed.ProcessGroup or 1-D DeviceMesh over which the columns of W and A are spread (with
        norm_axis=0 the rows of W and B); each process passes its own, and gets c of the whole rows: squares are added up
        before the root, in every call. base_sqnorm is that of these columns. With detach=False the gradient of c is added up
        over the group; A gets that of its columns, B this process's share, as from :func:`dora_linear` on such columns.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (N,), for norm_axis=0 (K,), of a bank (G, N), of experts (E, N), float32 (float64 for a float64 W), never rounded below
      that. A row with a NaN is NaN; the others are not. With a group the bits are the same in every process of it.
      With a state: ``NormState(c, fingerprint)``, c the same bit for bit; with a group too ``ShardNormState(c, fingerprint,
      part)``, where part, the norm of these columns, is what is reused.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, W requires grad, s is not finite, norm_axis is neither 0 nor 1,
        max_bytes is too small to honour, the state is of another weight, norm_axis=0 or detach=False meets a quantised W,
        state or squared meets detach=False or each other, or the group is none.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps nothing for backward when detached, else W, A, B and c. Derivation: ``fdora/eager/norm.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5 and section 4.3; Scaling DoRA, arXiv:2603.22276, eq. 3.
    """
    if isinstance(A, Tensor) and A.dim() == 3:
        refused = {"norm_axis": norm_axis != 1, "detach": not detach, "squared": squared}
        refused |= {"base_sqnorm": base_sqnorm is not None, "max_bytes": max_bytes is not None, "state": state is not None}
        if is_stack(W, B, s):
            return norm_of_experts(W, A, B, s, refused | {"group": group is not None}, backend)
        if group is not None:
            check_one_group("dora_norm", group)
        return norm_of_bank(W, A, B, s, refused, group, backend)
    fn, how = "dora_norm", NormHow(norm_axis, base_sqnorm, detach, max_bytes, state, squared, group)
    if not (type(W) in PLAIN and type(A) in PLAIN and type(B) in PLAIN) and is_sharded(W, A, B):
        from fdora.functional import _sharded_norm

        return _sharded_norm.norm(fn, W, A, B, s, how, backend)
    of = check_norm(fn, W, A, B, s, how)
    choice = select_backend(of.W, backend=backend).name
    if group is not None:
        if state is None:
            return sharded_norm(of, (group,), choice, detach, True)
        part = state.part if isinstance(state, ShardNormState) else state.c
        return ShardNormState(*sharded_guarded_norm(of, part, state.fingerprint, (group,), choice))
    if squared:
        return row_sqnorm(of, choice)
    if state is not None:
        return NormState(*guarded_norm(of, state[0], state[1], choice))
    return row_norm(of, choice, detach)


class NormHow(NamedTuple):
    """The arguments of :func:`dora_norm` beside W, A, B and s."""

    norm_axis: int = 1
    base_sqnorm: Tensor | None = None
    detach: bool = True
    max_bytes: int | None = None
    state: NormState | ShardNormState | None = None
    squared: bool = False
    group: Any = None


def check_norm(fn: str, W: Any, A: Tensor, B: Tensor, s: float, how: NormHow) -> NormOf:
    """What the norm of rows is of."""
    norm_axis, base_sqnorm, detach, max_bytes, state, squared, group = how
    if isinstance(W, Weight) and (norm_axis != 1 or not detach):
        arg, want = ("norm_axis", "1") if norm_axis != 1 else ("detach", "True")
        given = norm_axis if norm_axis != 1 else detach
        raise fail(fn, arg, f"{want} for a quantised W", given, "Pass W.dequantize().")
    if norm_axis == 0:
        check_weights(fn, {"W": W, "A": A, "B": B}, s)  # here, where they still have their names
        W, A, B = W.T, B.T, A.T
    elif norm_axis != 1:
        raise fail(fn, "norm_axis", "1 (a norm for each output row) or 0 (for each input column)", norm_axis, "DoRA's is 1.")
    key = key_of(fn, (W, A, B, base_sqnorm), s)
    if passed(key):
        check_frozen(fn, "W", W)
        check_frozen(fn, "base_sqnorm", base_sqnorm)
    else:
        check_weights(fn, {"W": W, "A": A, "B": B, "base_sqnorm": base_sqnorm}, s)
        check_dtype(fn, "base_sqnorm", base_sqnorm, WIDE, "Keep it as dora_base_sqnorm(W) returns it.")
        check_frozen(fn, "base_sqnorm", base_sqnorm)
        remember(key)
    if max_bytes is not None:
        need = smallest_bytes_of(W, A, B, base_sqnorm is not None)
        if not isinstance(max_bytes, (int, float)) or max_bytes < need:
            raise fail(fn, "max_bytes", f"at least {need} for these shapes", max_bytes, "Raise it, or pass None.")
    if squared and (state is not None or group is not None or not detach):
        have = "a state" if state is not None else "a group" if group is not None else "detach=False"
        raise fail(fn, "squared", "False there", f"True with {have}", "Square the norm, or take the root, yourself.")
    if group is not None:
        check_one_group(fn, group)
    if state is not None:
        check_state(fn, W, state, detach, group is not None)
    return NormOf(W, A, B, s, base_sqnorm, max_bytes)


def dora_base_sqnorm(W: Tensor | QuantWeight, *, max_bytes: int | None = None, backend: Backend = "auto") -> Tensor:
    """Squared row norm of the frozen weight: ``||W||^2`` along K, to be reused by :func:`dora_norm`.

    Args:
      W: (N, K) frozen weight, float16, bfloat16, float32 or float64, or a :class:`fdora.quant.QuantWeight`.
      max_bytes: most workspace in bytes, as for :func:`dora_norm`. A float32 or float64 W needs none.
      backend: "auto", "eager" or "triton".

    Returns:
      (N,), float32 (float64 for a float64 W). Detached.

    Raises:
      FdoraError: W is not a floating matrix, or requires grad.

    Memory: keeps nothing for backward.
    References: Scaling DoRA, arXiv:2603.22276, eq. 3 (base term).
    """
    fn = "dora_base_sqnorm"
    if is_sharded(W):
        from fdora.functional import _sharded_norm

        squares: Tensor = _sharded_norm.base(fn, W, max_bytes, backend)
        return squares
    check_shapes(fn, {"W": "N K"}, {"W": W})
    check_dtype(fn, "W", W, FLOATS, "Dequantise it first.")
    check_frozen(fn, "W", W)
    return _base_sqnorm(W, max_bytes, select_backend(W, backend=backend).name)


def dora_scale(m: Tensor, c: Tensor) -> Tensor:
    """Scale of each output row: ``g = m / max(c, 1e-12)``.

    Args:
      m: (N,) magnitude, float16, bfloat16, float32 or float64. Differentiable.
      c: (N,) float32 or float64 norm, see :func:`dora_norm`. Differentiable.

    Returns:
      (N,) in the dtype of c: g is never half precision (|g - 1| is about 0.0015 in practice, bf16 would round it away).
      A row of zeros gets g = m / 1e-12, never 0 / 0; a NaN row stays NaN.

    Raises:
      FdoraError: shapes or devices disagree, or c is half precision.

    Memory: as ``m / c`` in torch: keeps m and c.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    fn = "dora_scale"
    if is_sharded(m, c):
        from fdora.functional import _sharded

        g: Tensor = _sharded.scale(dora_scale, m, c)
        return g
    check_shapes(fn, {"m": "N", "c": "N"}, {"m": m, "c": c})
    check_dtype(fn, "m", m, FLOATS)
    check_dtype(fn, "c", c, WIDE, "Keep it as dora_norm returns it.")
    check_device(fn, "m", {"m": m, "c": c})
    return scale(m, c)
