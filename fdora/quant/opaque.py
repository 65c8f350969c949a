"""Any weight that some function can make dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdora._check import fail
from fdora.quant.weight import QuantWeight, check_floating, matrix, read_as, register_kind


class Opaque(NamedTuple):
    """How weights of kind opaque are stored. Tensors: an empty one, which is where the weight is, then the arguments of f."""

    f: Callable[..., Tensor]


def decode(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (place,) = read_as(W, Opaque, 1)
    dense = facts.f(*W.tensors[1:])
    if not isinstance(dense, Tensor) or tuple(dense.shape) != W.shape:
        have = tuple(dense.shape) if isinstance(dense, Tensor) else f"a {type(dense).__name__}"
        remedy = "Make f return the weight in nn.Linear layout."
        raise fail("quant.QuantWeight.dequantize", "f", f"a function that returns a tensor {W.shape}", have, remedy)
    return dense.detach().to(place.device)[first:last]


register_kind("opaque", dequantize=decode, tensors=("place",), by_rows=False)


def opaque(
    f: Callable[..., Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    tensors: Sequence[Tensor | None] = (),
) -> QuantWeight:
    """``W = f(*tensors)``, for a format that fdora does not know.

    Args:
      f: gives the dense (N, K) weight, every time the same. Compiled code traces it; what it reads beside ``tensors`` is not
        moved by ``.to(device)`` (its result is) and not seen by trees.
      shape: (N, K).
      dtype: that the weight stands for.
      device: where it is.
      tensors: what f is called with; they are moved, saved and traced with the weight.

    Returns:
      ``QuantWeight`` of kind opaque. All of W is made for any of its rows, in the dtype that f returns, then rounded once.

    Raises:
      FdoraError: the shape is not (N, K) or the dtype not floating; on dequantisation, f returns another shape.

    Memory: keeps f and ``tensors``. A norm calls f once and holds what it returns, beside its own workspace;
    so do forward and backward of experts of one stack.
    References: none.
    """
    fn = "quant.opaque"
    if not callable(f):
        raise fail(
            fn, "f", "a function that returns the dense weight", f"a {type(f).__name__}", "Pass, for example, w.dequantize."
        )
    check_floating(fn, dtype)
    place = torch.empty(0, device=device)  # knows where the weight is, also after .to(device)
    return QuantWeight("opaque", (place, *tensors), matrix(fn, shape), dtype, Opaque(f))
