"""What ``explain`` answers, and tensors without data to ask with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import name
from fdora._torch import PLAIN
from fdora.autograd.quant import is_whole
from fdora.predict import Gpu
from fdora.quant import QuantWeight


class Kept(NamedTuple):
    """A tensor that stays until backward. ``whose``: "argument", "output" or "new"; only the last costs memory by itself."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    whose: str


@dataclass(frozen=True)
class Explanation:
    """What a call launches, costs and keeps; ``print`` shows it. Plain torch has no plan: ``plans`` and ``kept`` are empty."""

    fn: str
    backend: str
    why: str
    gpu: Gpu | None
    """Whose published rates give the times; None where they are not known."""
    plans: tuple[Any, ...]
    """In the order in which they run: each has name, path, steps, workspace, flops, bytes and seconds."""
    kept: tuple[Kept, ...]
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Of all matrix products."""
        return sum(plan.flops for plan in self.plans)

    @property
    def bytes(self) -> float:
        """Read and written."""
        return sum(plan.bytes for plan in self.plans)

    @property
    def seconds(self) -> float | None:
        """Sum over steps of max(flops / rate, bytes / bandwidth): no launch is counted, no product reaches its rate."""
        return None if self.gpu is None or not self.plans else sum(plan.seconds for plan in self.plans)

    @property
    def workspace(self) -> int:
        """Bytes of temporaries of the plan that needs most."""
        return max((plan.workspace for plan in self.plans), default=0)

    @property
    def new_bytes(self) -> int:
        """Kept for backward beside arguments and outputs."""
        return sum(t.nbytes for t in self.kept if t.whose == "new")

    def __str__(self) -> str:
        lines = [f"{self.fn}: backend {self.backend} ({self.why})"]
        if self.gpu is not None:
            lines.append(
                f"{self.gpu.name}, by its published rates: {self.gpu.flops / 1e12:.0f} TFLOP/s in half precision, "
                f"{self.gpu.bytes / 1e12:.2f} TB/s. Times are floors, not measurements."
            )
        lines += [*self.notes, *map(str, self.plans)]
        if self.plans:
            time = "" if self.seconds is None else f", at least {1e6 * self.seconds:.1f} us"
            lines.append(f"all plans: {self.flops / 1e9:.3f} GFLOP, {self.bytes / 2**20:.2f} MiB moved{time}")
            kept = [f"  {t.name} {t.shape} {name(t.dtype)}, {t.nbytes / 2**20:.2f} MiB, {t.whose}" for t in self.kept]
            lines += ["kept for backward, beside the parameters:" if kept else "nothing is kept for backward", *kept]
        return "\n".join(lines)


def stored(W: QuantWeight) -> str:
    """What a quantised weight takes in memory, and what it would take."""
    N, K = W.shape
    dense = N * K * W.dtype.itemsize
    each = f", {W.nbytes / (N * K):.3f} bytes a weight" if N * K else ""
    return f"{(N, K)}: {W.nbytes / 2**20:.2f} MiB stored{each}; {dense / 2**20:.2f} MiB in {name(W.dtype)}"


def stand_in(t: Any) -> Any:
    """A tensor without data that a plan cannot tell from this one."""
    if isinstance(t, QuantWeight):
        return replace(t, tensors=tuple(map(stand_in, t.tensors)))
    if not isinstance(t, Tensor):
        return t
    has_address = type(t) in PLAIN and not t.is_meta
    at = t.data_ptr() if has_address else t.storage_offset() * t.itemsize
    offset = at % 16 // t.itemsize
    extent = offset + 1 + sum((n - 1) * d for n, d in zip(t.shape, t.stride(), strict=True) if n)
    bare = torch.empty(extent, dtype=t.dtype, device="meta").as_strided(t.shape, t.stride(), offset)
    return bare.requires_grad_() if t.requires_grad else bare


def decoding(fn: str, W: Any) -> str:
    """How plain torch decodes the weights of a call."""
    how = "once, as a whole" if is_whole(W) else "some rows at a time"
    if fn == "dora_norm":
        return f"W is decoded {how}."
    if fn == "dora_merge":
        return f"W is decoded, {how} for the norm."
    return "W is decoded for forward and again for backward, and freed after each; autograd keeps what is stored."
