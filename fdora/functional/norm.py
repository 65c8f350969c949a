"""The row norm, the squared norm of the base that it can reuse, and the scale g."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from fdora._check import (
    FLOATS,
    WIDE,
    check_device,
    check_dtype,
    check_frozen,
    check_shapes,
    check_weight,
    fail,
    is_sharded,
)
from fdora._dispatch import Backend
from fdora._torch import PLAIN
from fdora.autograd.multi import experts_norm
from fdora.autograd.norm import base_sqnorm as _base_sqnorm
from fdora.autograd.norm import guarded_norm, row_norm, row_sqnorm, scale, sharded_guarded_norm, sharded_norm
from fdora.autograd.norm import kept_norms as kept_norms
from fdora.functional.backend import select_backend
from fdora.functional.bank import check_kernels, check_stacks, is_stack, norm_over, scaling_of
from fdora.functional.norm_state import NormHow, NormState, ShardNormState, check_norm, check_one_group, start_of
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
        return _norm_of_many(W, A, B, s, refused, group, backend)
    fn, how = "dora_norm", NormHow(norm_axis, base_sqnorm, detach, max_bytes, state, squared, group)
    if not (type(W) in PLAIN and type(A) in PLAIN and type(B) in PLAIN) and is_sharded(W, A, B):
        from fdora.functional import _sharded

        return _sharded.norm(fn, W, A, B, s, how, backend)
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
        from fdora.functional import _sharded

        return _sharded.base(fn, W, max_bytes, backend)
    check_weight(fn, W)
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

        return _sharded.scale(dora_scale, m, c)
    check_shapes(fn, {"m": "N", "c": "N"}, {"m": m, "c": c})
    check_dtype(fn, "m", m, FLOATS)
    check_dtype(fn, "c", c, WIDE, "Keep it as dora_norm returns it.")
    check_device(fn, "m", {"m": m, "c": c})
    return scale(m, c)


def dora_norm_state(W: Tensor | QuantWeight) -> NormState:
    """The state to start with: it matches nothing, so that the first ``dora_norm(W, A, B, s=s, state=state)`` computes.

    Args:
      W: (N, K) frozen weight, float16, bfloat16, float32 or float64. Its values are not read; the state belongs to it alone.
        Of a DTensor it is a :class:`ShardNormState`.

    Returns:
      ``NormState(c, fingerprint)``: (N,) float32 (float64 for a float64 W) and (256,) int64, on the device of W.

    Raises:
      FdoraError: W is not a floating matrix.

    Memory: N numbers and 2 KiB; keeps nothing for backward.
    References: none; it is bookkeeping of this library.
    """
    fn = "dora_norm_state"
    if is_sharded(W):
        from fdora.functional import _sharded

        return _sharded.norm_state(W)  # type: ignore[return-value]  # as the docstring has it
    check_weight(fn, W)
    return start_of(W)


def _norm_of_many(
    W: Tensor | QuantWeight, A: Tensor, B: Tensor, s: Any, refused: dict[str, bool], group: Any, backend: Backend
) -> Tensor:
    """:func:`dora_norm` of a bank, or of experts in a stack. ``refused``: arguments that have no meaning there, and whether
    they are given."""
    fn, experts = "dora_norm", is_stack(W, B, s)
    what, one = ("a stack of experts", "expert") if experts else ("a bank of adapters", "adapter")
    if experts:
        refused = refused | {"group": group is not None}
    elif group is not None:
        check_one_group(fn, group)
    for arg, given in refused.items():
        if given:
            raise fail(fn, arg, f"left out for {what}", "a value", f"Ask for the norm of one {one} at a time.")
    if experts:
        sizes = check_stacks(fn, {"W": W, "A": A, "B": B}, s)
        like = A if isinstance(W, QuantWeight) else W
        name = select_backend(like, backend=backend).name
        if not isinstance(W, QuantWeight):  # of codes each expert has launches of its own
            check_kernels(fn, A, name)
        return experts_norm(W, A, B, s, scaling_of(s, sizes["E"], like), name)
    if is_sharded(W, A, B):
        from fdora.functional import _sharded

        return _sharded.norm_of_bank(fn, W, A, B, s, group, backend)
    return norm_over(fn, (W, A, B), s, None, () if group is None else (group,), backend)
