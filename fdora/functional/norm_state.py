"""What a norm is asked of, and its checks; a norm that is reused for as long as the bits of A, B and s stay the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import WIDE, Weight, check_dtype, check_frozen, check_only, check_weights, fail, name, once
from fdora._records import NormOf, acc_dtype
from fdora.autograd.norm import WORDS, smallest_bytes_of
from fdora.quant import QuantWeight


class NormState(NamedTuple):
    """A norm and what it was computed from: the value that ``dora_norm(state=)`` takes and returns."""

    c: Tensor
    fingerprint: Tensor


class ShardNormState(NamedTuple):
    """A :class:`NormState` of columns spread over processes: ``dora_norm(state=, group=)`` sums over them in every call."""

    c: Tensor
    fingerprint: Tensor
    part: Tensor
    """(N,) the norm of this process's columns, which is what the fingerprint belongs to."""


def start_of(W: Tensor | QuantWeight) -> NormState:
    """A state that matches nothing."""
    c = torch.zeros(W.shape[0], device=W.device, dtype=acc_dtype(W.dtype))
    return NormState(c, torch.zeros(WORDS, device=W.device, dtype=torch.int64))


def check_state(fn: str, W: Any, state: NormState | ShardNormState, detach: bool, grouped: bool) -> None:
    """A state of this W's shape, dtype and device."""
    start = "Start with dora_norm_state(W)."
    if isinstance(state, ShardNormState):
        if not grouped:
            raise fail(fn, "state", "a NormState without a group", "a ShardNormState", "Pass group=, in every call.")
        state = NormState(state.part, state.fingerprint)
    if not isinstance(state, tuple) or len(state) != 2 or not all([isinstance(t, Tensor) for t in state]):
        raise fail(fn, "state", "a NormState", f"a {type(state).__name__}", start)
    if not detach:
        raise fail(fn, "state", "None with detach=False", "a NormState", "A norm that is reused has no gradient: detach it.")
    like = {"c": ((W.shape[0],), acc_dtype(W.dtype)), "fingerprint": ((WORDS,), torch.int64)}
    for (part, (shape, dtype)), t in zip(like.items(), state, strict=True):
        if tuple(t.shape) != shape or t.dtype != dtype or t.device != W.device:
            have = f"{tuple(t.shape)} {name(t.dtype)} on {t.device}"
            raise fail(fn, f"state.{part}", f"{shape} {name(dtype)} on {W.device}", have, start)


def check_one_group(fn: str, group: Any) -> None:
    """What squares can be added up over."""
    if torch.distributed.is_available():
        from torch.distributed import ProcessGroup
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, ProcessGroup) or (isinstance(group, DeviceMesh) and group.ndim == 1):
            return
    mesh = type(group).__name__ == "DeviceMesh"
    have = f"a mesh of {group.ndim} dimensions" if mesh else f"a {type(group).__name__}"
    raise fail(fn, "group", "a ProcessGroup or a DeviceMesh of one dimension", have, "Pass that of the columns, as mesh['tp'].")


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
    if isinstance(W, Weight):
        check_only(fn, "for a quantised W", "Pass W.dequantize().", norm_axis=(norm_axis, 1), detach=(detach, True))
    if norm_axis == 0:
        check_weights(fn, {"W": W, "A": A, "B": B}, s)  # here, where they still have their names
        W, A, B = W.T, B.T, A.T
    elif norm_axis != 1:
        raise fail(fn, "norm_axis", "1 (a norm for each output row) or 0 (for each input column)", norm_axis, "DoRA's is 1.")

    def check() -> None:
        check_weights(fn, {"W": W, "A": A, "B": B, "base_sqnorm": base_sqnorm}, s)
        check_dtype(fn, "base_sqnorm", base_sqnorm, WIDE, "Keep it as dora_base_sqnorm(W) returns it.")

    once(fn, (W, A, B, base_sqnorm), (s,), check, door=False, W=W)
    check_frozen(fn, "base_sqnorm", base_sqnorm)
    if max_bytes is not None:
        need = smallest_bytes_of(W, A, B, base_sqnorm is not None)
        if not isinstance(max_bytes, (int, float)) or max_bytes < need:
            raise fail(fn, "max_bytes", f"at least {need} for these shapes", max_bytes, "Raise it, or pass None.")
    if squared and (state is not None or group is not None or not detach):
        have = "a state" if state is not None else "a group" if group is not None else "detach=False"
        raise fail(
            fn,
            "squared",
            "False with a state, a group or detach=False",
            f"True with {have}",
            "Square the norm, or take the root, yourself.",
        )
    if group is not None:
        check_one_group(fn, group)
    if state is not None:
        check_state(fn, W, state, detach, group is not None)
    return NormOf(W, A, B, s, base_sqnorm, max_bytes)
