"""The adapted experts of a mixture, on tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._check import (
    FLOATS,
    check_device,
    check_dtype,
    check_frozen,
    check_rank,
    check_s,
    check_shapes,
    check_whole,
    fail,
    is_sharded,
)
from fdora._dispatch import Backend
from fdora.autograd.norm import is_real
from fdora.functional.linear import dora_linear
from fdora.functional.norm import WIDE
from fdora.quant import QuantWeight


def dora_experts(
    x: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    offsets: Tensor | Sequence[int],
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """A DoRA layer for each expert: ``y[t] = g[e] * (x[t] @ W[e].T + s * (x[t] @ A[e].T) @ B[e].T) + bias[e]``, e of token t.

    ``g = m / ||W + s * B @ A||`` for each row of each expert. A loop of :func:`dora_linear` over the experts that have tokens:
    there is no grouped kernel yet. Stacks that are DTensors are cut by experts: x and offsets are those of the experts here.

    Args:
      x: (T, K) tokens, those of expert 0 first, float16, bfloat16, float32 or float64.
      W: (E, N, K) frozen weights, in the dtype of x (any, under autocast). Where a model keeps (E, K, N), its transpose.
      A: (E, r, K), float32 or the dtype of W.
      B: (E, N, r), float32 or the dtype of W.
      m: (E, N), float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      offsets: E whole numbers: where the tokens of each expert end, as ``torch.cumsum`` of their counts gives it. A tensor is
        read by the host, which waits for it; compiled code takes Python numbers alone.
      bias: (E, N), added after g.
      norm: (E, N) float32 (or float64), :func:`dora_norm` of each expert; None computes that of the experts that have tokens.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (T, N), dtype and device of x; rows behind the last offset are zero. Gradients reach x, A, B, m, bias and a given norm,
      each in its own dtype; those of an expert without tokens are zero.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, W requires grad or is quantised, s is not finite, offsets fall or end
        behind x, or a compiler meets them as a tensor.
      NotImplementedError: a second derivative is asked for.

    Memory: as :func:`dora_linear` for the tokens of each expert; y once more while its parts are put together.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    fn = "dora_experts"
    if is_sharded(x, W, A, B, m, bias, norm):
        from fdora.functional import _sharded_layers

        return _sharded_layers.experts(dora_experts, x, W, A, B, m, bias, norm, s=s, offsets=offsets, backend=backend)
    check_experts(fn, x, W, A, B, m, s, bias, norm)
    ends = ends_of(fn, offsets, x.shape[0], W.shape[0])
    counts = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    *xs, rest = x.split([*counts, x.shape[0] - ends[-1]])
    lists = [W.unbind(), A.unbind(), B.unbind(), m.unbind()]
    biases, norms = (([None] * len(counts)) if t is None else t.unbind() for t in (bias, norm))
    parts = [
        dora_linear(part, *operands, s=s, bias=b, norm=c, backend=backend)
        for part, count, *operands, b, c in zip(xs, counts, *lists, biases, norms, strict=True)
        if count
    ]
    like = parts[0] if parts else dora_linear(rest[:0], *(t[0] for t in lists), s=s, norm=_ones(W), backend=backend)
    if rest.shape[0] or not parts:
        parts.append(like.new_zeros(rest.shape[0], W.shape[1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ones(W: Tensor) -> Tensor:
    """A norm for a call without tokens."""
    return W.new_ones(W.shape[1], dtype=torch.promote_types(W.dtype, torch.float32))


def check_experts(
    fn: str, x: Tensor, W: Any, A: Tensor, B: Tensor, m: Tensor, s: float, bias: Tensor | None, norm: Tensor | None
) -> None:
    if isinstance(W, QuantWeight):
        raise fail(fn, "W", "a tensor", "a QuantWeight", "Call dora_linear for each expert: it takes one.")
    spec = {"W": "E N K", "A": "E r K", "B": "E N r", "m": "E N", "bias": "E N", "norm": "E N", "x": "T K"}
    tensors = {"W": W, "A": A, "B": B, "m": m, "bias": bias, "norm": norm, "x": x}
    maker = "torch.stack([dora_norm(w, a, b, s=s) for w, a, b in zip(W, A, B)])"
    check_whole(fn, tensors)
    sizes = check_shapes(fn, spec, tensors, "(experts, out, in)", maker)
    check_rank(fn, sizes["r"])
    if sizes["E"] < 1:
        raise fail(fn, "W", "of at least one expert", f"{tuple(W.shape)}", "Stack the weights of the experts.")
    check_device(fn, "W", tensors)
    check_dtype(fn, "W", W, FLOATS, "Dequantise or cast it first.")
    for arg in ("A", "B", "m"):
        check_dtype(fn, arg, tensors[arg], (torch.float32, W.dtype))
    check_dtype(fn, "x", x, FLOATS, "Cast it to the dtype of W.")
    check_dtype(fn, "bias", bias, FLOATS)
    check_dtype(fn, "norm", norm, WIDE, "Keep it as dora_norm returns it.")
    check_frozen(fn, "W", W)
    check_s(fn, s)


def ends_of(fn: str, offsets: Any, tokens: int, experts: int) -> list[int]:
    """On the host."""
    if isinstance(offsets, Tensor):
        check_dtype(fn, "offsets", offsets, (torch.int64, torch.int32))
        check_shapes(fn, {"offsets": "E"}, {"offsets": offsets})
        if not is_real(offsets):
            remedy = "Call it outside, or pass offsets.tolist()."
            raise fail(fn, "offsets", "Python numbers in code that is compiled, mapped or on meta", "a Tensor", remedy)
        ends = offsets.tolist()
    else:
        ends = list(offsets) if isinstance(offsets, (list, tuple)) else [None]
        if not all(isinstance(end, (int, torch.SymInt)) and not isinstance(end, bool) for end in ends):
            raise fail(fn, "offsets", "a tensor or a list of whole numbers", repr(offsets), "Pass counts.cumsum(0).")
    if len(ends) != experts:
        raise fail(
            fn, "offsets", f"{experts} numbers (the experts of `W`)", len(ends), "The end of each, without a 0 in front."
        )
    if any(b > e for b, e in zip([0, *ends], [*ends, tokens], strict=True)):
        raise fail(fn, "offsets", f"rising from 0 to {tokens} at most (the tokens of `x`)", ends, "Pass counts.cumsum(0).")
    return ends
