"""The door for integrations: bind a call once, then call it without checks; and what a shim needs to know of a layer.

A shim that calls the same layers again and again checks them itself: plain tensors, no transform or trace, W frozen, norms
given, and x in the dtype of the products, whatever autocast says. For the facts of such a call (shapes, strides, dtypes,
device, what requires grad) :func:`bind` chooses the plan; :func:`call` runs it on any tensors with these facts. Nothing is
checked there.

    bound = prepared.bind((x, *operands), s=(2.0,), saved=(True,), keep_inner=False, backend="triton")
    (y,) = prepared.call((x, *operands), bound)

A call is described ahead of its first tokens as an :class:`Ahead`, and :func:`compile_ahead` compiles its kernels.

The other names are those of fdora.functional that shims share: an op that a trace of Dynamo does not look into
(:func:`linears`), the seeds of a call (:func:`drawn`), whether a backend reads the codes of a format (:func:`is_decoded`), a
kept norm whose gradient is wanted (:func:`attached`), LayerScale (:func:`folded`), rows of a convolution's weight
(:func:`kernel_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fdora._records import Dropout, Options
from fdora.autograd.node import Call, bound, bound_layers
from fdora.autograd.weight import is_decoded
from fdora.functional._epilogue import folded, loses_inner
from fdora.functional._seed import drawn
from fdora.functional.ahead import Ahead, Warmup, compile_ahead
from fdora.functional.conv import kernel_rows
from fdora.functional.linear import attached, check_detach, on_gpu, saved_as
from fdora.functional.opaque import is_opaque, linears
from fdora.quant import QuantSpec

__all__ = [
    "Ahead",
    "Warmup",
    "attached",
    "bind",
    "call",
    "check_detach",
    "compile_ahead",
    "drawn",
    "folded",
    "is_decoded",
    "is_opaque",
    "kernel_rows",
    "linears",
    "loses_inner",
]

Computes = tuple[Literal["fp8", "mxfp8", "nvfp4"] | None, Literal["fp8", "mxfp8"] | None]
NOTHING_DROPPED = Dropout(0.0, "lora")


def bind(
    tensors: tuple[Tensor | None, ...],
    s: tuple[float, ...],
    saved: tuple[bool, ...],
    keep_inner: bool,
    backend: str,
    full: bool = False,
    act: str | None = None,
    drop: Dropout = NOTHING_DROPPED,
    computes: Computes = (None, None),
    specs: Sequence[QuantSpec] = (),
    autocast: bool = False,
) -> Call:
    """What :func:`call` takes for all tensors with the facts of these.

    Args:
      tensors: x, then W, A, B, m, c, bias and seed of each layer; of a quantised W None, and its tensors behind all of these.
      s: the scaling of each.
      saved: of each, whether a gradient of its m (or, with ``full``, of A and B through c) will be asked for.
      keep_inner: as for :func:`fdora.functional.dora_linear`; of an MLP for down.
      backend: "eager" or "triton".
      full: of one layer: c is given as a constant, and gradients reach A and B through it.
      act: None, or the activation of a gated MLP whose layers are gate, up and down.
      drop: p and mode of dropout; with p = 0 every seed is None.
      computes: ``compute`` and ``grad_compute`` of :func:`fdora.functional.dora_linear`.
      specs: the ``spec`` of each W, if they are QuantWeights. The backend must read their codes.
      autocast: calls come under it.
    """
    inner = [keep_inner and (act is None or i == len(s) - 1) for i in range(len(s))]
    options = [Options(*each) for each in zip(s, map(saved_as, saved, inner), strict=True)]
    fp8, fp8_grad = on_gpu("prepared.bind", computes, tensors[0], backend)  # type: ignore[arg-type]
    of = Call(tuple(options), drop, backend, act, full, fp8, fp8_grad, specs=tuple(specs) or None)
    return bound(tensors, of, autocast)


call = bound_layers  # (tensors, what bind returned) -> each y, of an MLP one
