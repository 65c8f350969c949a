"""A recording: which plans a call of tensors without data runs on a GPU that need not be there. Nothing runs, no plan is kept.

``with recording(device) as noted: fn(*tensors on meta)``; walk.py asks :func:`active` where it makes and runs plans. It holds
for the thread that began it, in which torch also walks backward through tensors on meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._torch import storage_of


class Decoding(NamedTuple):
    """A dense W, or its rows one run after the other, made by plain torch from ``stored`` bytes."""

    kind: str
    stored: int
    N: int
    K: int
    dtype: torch.dtype


class Recording:
    """The plans and decodings of a call in the order in which they run, and the name of each tensor that a plan made."""

    def __init__(self, device: Any, autocast: bool):
        self.device, self.autocast = device, autocast
        self.plans: list[Any] = []
        self.names: dict[int, str] = {}
        self.results: list[Tensor] = []  # held: another tensor could have their place

    def run(self, plan: Any) -> tuple[Tensor, ...]:
        """Results without data in the place of the plan's own."""
        self.plans.append(plan)
        made = tuple(torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta") for a in plan.results)
        self.results += made
        self.names |= {storage_of(t): a.name for t, a in zip(made, plan.results, strict=True)}
        return made

    def decode(self, W: Any, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows of a quantised W that torch decodes; those of one pass are one decoding."""
        if first == 0:
            self.plans.append(Decoding(W.kind, W.nbytes, W.shape[0], W.shape[1], dtype))
        return torch.empty(last - first, W.shape[1], dtype=dtype, device="meta")


class _State(local):
    recording: Recording | None = None


_state = _State()


def active() -> Recording | None:
    """The recording of this thread."""
    return _state.recording


@contextmanager
def recording(device: Any, autocast: bool = False, kind: Any = Recording) -> Iterator[Any]:
    """Notes what runs inside as on this device; with ``autocast`` x was cast already, and other tensors need not match it."""
    before, noted = _state.recording, kind(device, autocast)
    _state.recording = noted
    try:
        yield noted
    finally:
        _state.recording = before
