"""One layer as a record: what the public functions pass to their checks and to the doors for DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fdora.quant import QuantWeight


class DoraLayer(NamedTuple):
    """One layer of a call that takes several: what :func:`dora_linear` takes beside x, by the same names.

    ``DoraLayer(W, *params, s=s)`` with :class:`DoraParams`; ``DoraLayer(W)`` or ``DoraLayer(W, bias=bias)`` is a frozen
    layer without an adapter, ``y = x @ W.T + bias``. Made for the call: gradients are those of the tensors in it.
    """

    W: Tensor | QuantWeight
    """(N, K) frozen weight, or a quantised one."""
    A: Tensor | None = None
    """(r, K)."""
    B: Tensor | None = None
    """(N, r)."""
    m: Tensor | None = None
    """(N,)."""
    s: float | None = None
    """LoRA scaling; it must be given with an adapter."""
    bias: Tensor | None = None
    """(N,)."""
    norm: Tensor | None = None
    """(N,) c of :func:`dora_norm`; None computes it."""


def tensors_of(layer: DoraLayer, **more: Any) -> dict[str, Any]:
    """Its tensors by the names of their arguments, and more of them."""
    W, A, B, m, _, bias, norm = layer
    return {"W": W, "A": A, "B": B, "m": m, "bias": bias, "norm": norm, **more}


def parts(layer: DoraLayer) -> tuple[Any, ...]:
    """The layer, for code that comes after its checks: it has an adapter and an s."""
    return layer


def labelled(fn: str, layers: Sequence[DoraLayer]) -> dict[str, DoraLayer]:
    """The layers by what errors call them."""
    return {f"{fn}: layers[{i}]": layer for i, layer in enumerate(layers)}
