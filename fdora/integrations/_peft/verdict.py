"""Whether dora_linear can take the tensors of calls, and what then is left to check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fdora import _facts
from fdora._check import FLOATS
from fdora._dispatch import forced
from fdora._torch import PLAIN, autocast_on, is_traced
from fdora.functional import select_backend
from fdora.integrations._peft.dora import served
from fdora.quant import QuantWeight

if TYPE_CHECKING:
    from fdora.integrations._peft.steady import Call

Verdict = tuple[str, str]
_verdicts: dict[tuple, Verdict] = {}
MAX_VERDICTS = 8192


def verdict(x: Tensor, calls: Sequence[Call], mlp: bool = False) -> Verdict:
    """Why dora_linear cannot take these tensors, empty where it can; and the backend that runs if nothing is left to check.

    Remembered by all that it looks at. All calls have the same p.
    """
    W = calls[0].W
    key = None
    if not is_traced() and W.device.type != "meta":
        tensors: list[Tensor | None] = [x]
        specs: list[Any] = []
        for call in calls:
            if isinstance(call.W, QuantWeight):
                specs += (call.W.spec, call.dtype)
                tensors += (*call.W.tensors, *call[2:6])
            else:
                tensors += call[1:6]  # type: ignore[arg-type]
        found = _facts.facts(tuple(tensors))
        if found is not None:
            frozen = not (W.requires_grad if len(calls) == 1 else any([call.W.requires_grad for call in calls]))
            key = (found, tuple(specs), frozen, calls[0].p == 0, mlp, autocast_on(x), forced())
            known = _verdicts.get(key)
            if known is not None:
                return known
    made = "", ""
    for call in calls:  # no next(.., "") and no slice of a NamedTuple: Dynamo of torch 2.8 has neither
        why = _refusal(x, call.W, call.A, call.B, call.m, call.bias, call.dtype)
        if why:
            made = why, ""
            break
    if key is None:
        return made
    if not made[0] and calls[0].p == 0 and fits(x, calls, mlp):
        made = "", select_backend(x).name
    if len(_verdicts) >= MAX_VERDICTS:
        _verdicts.clear()
    _verdicts[key] = made
    return made


def settled(x: Tensor, found: Sequence[tuple[Any, ...]], mlp: bool = False) -> str:
    """The backend of a call of these dense layers, each (its variant, s, its operands), without dropout and autocast, if
    :func:`verdict` has passed one like it; else empty."""
    facts = _facts.facts((x, *[t for each in found for t in each[2:]]))
    if facts is None or x.is_mps:  # who has an autocast of its own
        return ""
    #                                     no codes, frozen, p == 0, no autocast
    known = _verdicts.get((facts, (), True, True, mlp, False, forced()))
    return "" if known is None or known[0] else known[1]


def fits(x: Tensor, calls: Sequence[Call], mlp: bool) -> bool:
    """Whether dora_linear, or dora_mlp, would find nothing wrong, and cast nothing."""
    if (
        x.dim() == 0
        or x.dtype != calls[0].W.dtype
        or autocast_on(x)
        or any([isinstance(call.W, QuantWeight) for call in calls])
    ):
        return False
    widths = [x.shape[-1]] * len(calls)
    if mlp:
        widths[2] = calls[0].W.shape[0]
    if any(
        call.W.shape[1] != K or call.W.dtype != x.dtype or call.A.shape[0] == 0 for call, K in zip(calls, widths, strict=True)
    ):
        return False
    for call in calls:
        bias = call.bias
        if bias is not None and (bias.shape != call.W.shape[:1] or bias.device != x.device or bias.dtype not in FLOATS):
            return False
    return not mlp or calls[0].W.shape == calls[1].W.shape


def _refusal(x: Tensor, W: Any, A: Tensor, B: Tensor, m: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> str:
    why = unfit(x, W, A, B, m, dtype)
    if why or isinstance(W, QuantWeight) or torch.is_autocast_enabled(W.device.type):
        return why
    if bias is not None and x.dtype == torch.float32 and select_backend(x).name == "eager":
        return "float32 with a bias, eager: the base layer's own sum keeps a fresh adapter an exact no-op"
    return ""


def unfit(x: Tensor, W: Any, A: Tensor, B: Tensor, m: Tensor | None, dtype: torch.dtype | None) -> str:
    """Why no call takes these tensors; m is None of plain LoRA."""
    m = B.new_empty(W.shape[0]) if m is None else m
    if type(x) not in PLAIN:
        return f"the input is a {type(x).__name__}"
    device, quant = W.device, isinstance(W, QuantWeight)
    for t in (A, B, m) if quant else (W, A, B, m):
        if type(t) not in PLAIN or t.device != device:
            return "sharded parameters, or on several devices"
    if x.device != device or device.type == "meta":
        return "the input is on another device, or meta tensors"
    w = served(W, W, A, B, m)
    if isinstance(w, str):
        return w
    if dtype is None and x.dtype != W.dtype and not torch.is_autocast_enabled(device.type):
        return f"a {x.dtype} input for a {W.dtype} base weight"
    return ""
