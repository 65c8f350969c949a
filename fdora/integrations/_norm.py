"""The norm that one adapter of one layer keeps from call to call, for as long as the bits of A, B and s stay the same."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fdora.functional import NormState, dora_norm, dora_norm_state, select_backend
from fdora.functional.norm import guarded_norm, kept_norm

PLAIN = (Tensor, nn.Parameter)
SMALL = 1 << 18  # elements of W below which its norm is computed sooner than A and B are compared


class KeptNorm:
    """A copy or a pickle of the layer starts without one."""

    def __init__(self) -> None:
        self.memo: tuple[Any, Any, NormState] | None = None
        self.room: tuple[Any, Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type[KeptNorm], tuple[()]]:
        return KeptNorm, ()

    def forget(self) -> None:
        """The base weight may have changed: the next norm is computed."""
        self.memo = None
        if self.room is not None:
            self.room[2].zero_()

    def make_room(self, W: Any) -> None:
        """Forget; and where compiled code can keep the norm of W, make room: it fills tensors, but makes none that stay."""
        self.memo = self.room = None
        plain = type(W) in PLAIN and W.is_floating_point() and W.element_size() > 1 and not W.is_meta
        if plain and W.numel() >= SMALL and select_backend(W).name == "triton":
            with torch.inference_mode(False):  # else nobody outside of it could write there
                self.room = (weakref.ref(W), *dora_norm_state(W.detach()))

    def of(self, owner: Any, W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
        """c (N,). owner is the parameter that W is, or was made from. Mapped code computes it every time."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or W.numel() < SMALL:
            room = self.room
            if room is None or room[0]() is not owner or room[1].device != W.device or not compiled_kernels(W):
                return dora_norm(W, A, B, s=s)
            return kept_norm(W, A, B, s, room[1], room[2])
        key = (W.dtype, W.device, W.shape, torch.is_inference_mode_enabled(), version(owner))
        memo = self.memo  # read and written as a whole: the replicas of DataParallel share it
        if memo is None or memo[0] != key or memo[1]() is not owner:
            memo = (key, weakref.ref(owner), dora_norm_state(W))
            after = dora_norm(W, A, B, s=s, state=memo[2])
        else:  # of the same W: what dora_norm would check has been checked
            after = NormState(*guarded_norm(W, A, B, None, s, None, *memo[2], select_backend(W).name))
        if capturing(W):
            for old, new in zip(memo[2], after, strict=True):  # a replay reads and writes the memory from before the capture
                old.copy_(new)
            self.memo = memo
        else:
            self.memo = (*memo[:2], after)
        return after.c


def capturing(t: Tensor) -> bool:
    """Whether what runs on t now goes into a CUDA graph."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def compiled_kernels(W: Tensor) -> bool:
    """Whether compiled code calls kernels here, and for one adapter, not for a mapped bank of them."""
    mapped = torch._C._are_functorch_transforms_active()
    return torch.compiler.is_compiling() and not mapped and select_backend(W).name == "triton"


def version(t: Tensor) -> int:
    """Moves with most changes in place. Adapters are compared by their bits; of W only this is looked at."""
    return 0 if t.is_inference() else t._version
