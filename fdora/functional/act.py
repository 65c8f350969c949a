"""A gated activation, for MLPs whose layers are called one by one; :func:`dora_mlp` has its own."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fdora._check import fail
from fdora._dispatch import Backend
from fdora.autograd.act import gated_act as run
from fdora.autograd.node import ACTS
from fdora.functional.backend import select_backend


def gated_act(
    gate: Tensor, up: Tensor, act: Literal["silu", "gelu", "gelu_tanh"] = "silu", *, backend: Backend = "auto"
) -> Tensor:
    """``a = f(gate) * up``, computed in float32 (float64 for float64) and rounded once.

    Args:
      gate, up: (..., F) of one floating dtype.
      act: "silu", "gelu" (exact) or "gelu_tanh".
      backend: "auto", "eager" or "triton".

    Returns:
      (..., F) in that dtype.

    Raises:
      FdoraError: shapes, dtypes or devices differ, or act is unknown.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps gate and up for backward. Derivation: ``fdora/eager/act.py``.
    """
    if act not in ACTS:
        raise fail("gated_act", "act", f"one of {', '.join(ACTS)}", repr(act), "Compute other activations with torch.")
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        like, have = (f"{tuple(t.shape)}, {t.dtype} on {t.device}" for t in (gate, up))
        raise fail("gated_act", "up", f"{like}, as `gate` is", have, "Compute both from the same x.")
    return run(gate, up, act, select_backend(gate, backend=backend).name)
