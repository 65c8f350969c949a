"""A norm that is reused for as long as the bits of A, B and s stay the same: the value, its start and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import FLOATS, check_dtype, check_shapes, fail, is_sharded, name
from fdora.autograd.norm import WORDS
from fdora.quant import QuantWeight


class NormState(NamedTuple):
    """A norm and what it was computed from: the value that ``dora_norm(state=)`` takes and returns."""

    c: Tensor
    fingerprint: Tensor


class ShardNormState(NamedTuple):
    """The same of columns that are spread over processes, where ``dora_norm(state=, group=)`` adds up in every call."""

    c: Tensor
    fingerprint: Tensor
    part: Tensor
    """(N,) the norm of this process's columns, which is what the fingerprint belongs to."""


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
        from fdora.functional import _sharded_norm

        start: Any = _sharded_norm.norm_state(W)
        return start
    check_shapes(fn, {"W": "N K"}, {"W": W})
    check_dtype(fn, "W", W, FLOATS, "Dequantise it first.")
    c = torch.zeros(W.shape[0], device=W.device, dtype=torch.promote_types(W.dtype, torch.float32))
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
    like = {"c": ((W.shape[0],), torch.promote_types(W.dtype, torch.float32)), "fingerprint": ((WORDS,), torch.int64)}
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
