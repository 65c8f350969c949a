"""The adapted experts of a mixture: one layer, on tokens that are sorted by expert or come with the experts of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fdora._check import (
    FLOATS,
    check_device,
    check_dtype,
    check_left_out,
    check_shapes,
    check_tensor,
    fail,
    is_int,
    once,
)
from fdora._dispatch import Backend
from fdora._records import Operands
from fdora._torch import functorch_active, without_grad
from fdora.autograd.experts import Route, combine, spread
from fdora.autograd.multi import Call, Tokens, experts_norm, fault, multi, route
from fdora.autograd.norm import is_real
from fdora.autograd.quant import is_whole
from fdora.functional.backend import select_backend
from fdora.functional.bank import check_kernels, check_one, check_stacks, scaling_of
from fdora.functional.layer import DoraLayer, parts, tensors_of
from fdora.functional.linear import BLACKWELL, COMPUTES, cast_x, check_computes, dora_linear, in_sums, on_gpu, save_for_dm
from fdora.quant import QuantWeight, cut
from fdora.quant.part import experts_of


def dora_experts(
    x: Tensor,
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    offsets: Tensor | Sequence[int] | None = None,
    ids: Tensor | None = None,
    gates: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    compute: Literal["fp8"] | None = None,
    grad_compute: Literal["fp8"] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """A DoRA layer for each expert: ``y[t] = g[e] * (x[t] @ W[e].T + s * (x[t] @ A[e].T) @ B[e].T) + bias[e]``, e: its expert.

    ``g = m / ||W + s * B @ A||`` for each row of each expert. Kernels route the tokens on the device: one grouped product for
    all experts, that of :func:`dora_linear_multi`. In plain torch a loop of :func:`dora_linear` over the experts that have
    tokens. Stacks that are DTensors are cut by experts: x, with offsets or ids, is that of the experts here.

        y = dora_experts(x, W, A, B, m, s=s, offsets=counts.cumsum(0))  # sorted
        y = dora_experts(x, W, A, B, m, s=s, ids=top_k, gates=weights)  # y[t] = sum of gates[t, j] * (expert ids[t, j] of x[t])

    Args:
      x: (T, K) tokens, float16, bfloat16, float32 or float64; by offsets those of expert 0 first.
      W: (E, N, K) frozen weights, in the dtype of x (any, under autocast). Where a model keeps (E, K, N), its transpose. Or a
        :class:`fdora.quant.QuantWeight` of (E N, K), the rows of expert 0 first: a stack whose first two axes were flattened,
        as in ``from_mxfp4(blocks.flatten(0, 1), scales.flatten(0, 1))``. Kernels decode all of it, plain torch an expert at a
        time (an opaque one once for all); it is dense in the dtype of x while forward or backward runs.
      A: (E, r, K), float32 or the dtype of W; with kernels E is at most 65,535.
      B: (E, N, r), float32 or the dtype of W.
      m: (E, N), float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      offsets: E whole numbers: where the tokens of each expert end, as ``torch.cumsum`` of their counts gives it. Kernels do
        not look at the values of a tensor on a GPU: they must not decrease or pass T. Plain torch reads it on the host, which
        waits for it, and compiled takes Python numbers alone.
      ids: (T, k) or (T,), int64 or int32, instead of offsets: the experts of each token, -1 for none. On a GPU their values
        are not looked at: they must be from -1 to E - 1. Plain torch reads how many each has on the host.
      gates: as ids, any float dtype, or None.
      bias: (E, N), added after g.
      norm: (E, N) float32 (or float64), :func:`dora_norm` of the stack; None computes it (in plain torch that of the experts
        that have tokens).
      compute: None, or "fp8" as of :func:`dora_linear`, of any number of tokens: W is a QuantWeight of e4m3 codes, and on sm_90
        and sm_100 is multiplied as it is.
      grad_compute: the same of backward, for dx.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (T, N), dtype and device of x; with ids and no gates (T, k, N), each expert by itself, or (T, N) where ids are (T,). Rows
      behind the last offset, and those of -1, are zero. Gradients reach x, A, B, m, bias, gates and a given norm, each in its
      own dtype; those of an expert without tokens are zero.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, W requires grad, s is not finite, not exactly one of
        offsets and ids is given, gates come without ids, offsets fall or end behind x, or a compiler of plain torch meets
        offsets or ids as a tensor.
      NotImplementedError: a second derivative is asked for.

    Memory: as :func:`dora_linear` for the tokens of each expert: x, x @ A.T and y itself or the value before g; by ids T k rows
    of x and y, whose order takes 24 bytes a row. Derivation: ``fdora/eager/multi.py`` and ``fdora/eager/experts.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5; Shazeer et al., 2017, arXiv:1701.06538, eq. 2, for the gates.
    """
    fn, layer = "dora_experts", DoraLayer(W, A, B, m, s, bias, norm)
    if check_experts(fn, x, layer):
        from fdora.functional import _sharded

        check_left_out(fn, {"compute": compute is not None, "grad_compute": grad_compute is not None})
        given: dict[str, Any] = {"offsets": offsets, "ids": ids, "gates": gates, "backend": backend}
        return _sharded.experts(dora_experts, x, layer, **given)
    E = m.shape[0]
    check_route(fn, x, E, offsets, ids, gates)
    name = select_backend(x, backend=backend).name
    check_kernels(fn, A, name)
    asked = compute, grad_compute
    if any(asked):
        x = cast_x(fn, x, W)
        check_codes(fn, asked, x, {fn: W}, E, name)
    if ids is None:
        return sorted_rows(fn, x, layer, offsets, name, asked)
    to = route_of(fn, ids, E, name)
    x = cast_x(fn, x, W)
    return joined(sorted_rows(fn, spread(x, to, name), layer, to.offsets, name, asked), ids, gates, to, name)


def sorted_rows(fn: str, x: Tensor, layer: DoraLayer, offsets: Any, name: str, asked: tuple[Any, Any]) -> Tensor:
    """x (T, K), sorted by expert -> (T, N)."""
    E, x = count_of(layer), cast_x(fn, x, layer.W)
    if name == "triton":
        scale, ready = scaled(x, layer, name)
        ends = ends_on(fn, offsets, x, E)
    else:
        numbers = ends_of(fn, offsets, x.shape[0], E)
        if not is_whole(layer.W) or torch.compiler.is_compiling() or functorch_active():
            return _loop(x, layer, numbers, asked)
        # The loop as one node, of a W that only comes as a whole: so it is made once for each direction, not for each expert.
        wanted = [end > begin for begin, end in zip([0, *numbers[:-1]], numbers, strict=True)]
        _, ready = scaled(x, layer, name, wanted)
        ends = torch.tensor(numbers, dtype=torch.int64)  # on the host, as s then is: both are read there
        scale = torch.full((E,), layer.s, dtype=torch.float64)  # type: ignore[arg-type]
    saves = save_for_dm(ready.m, ready.c, False) != "nothing"
    return multi(x, ready, Tokens(scale, ends), Call(None, 0.0, saves, name, fn, True, "lora", *map(bool, asked)))


def scaled(x: Tensor, layer: DoraLayer, name: str, wanted: Sequence[bool] = ()) -> tuple[Tensor, Operands]:
    """s of each expert, and the operands with the norms, at least of those that are ``wanted``."""
    W, A, B, m, s, bias, c = parts(layer)
    scale = scaling_of(s, A.shape[0], x)
    c = experts_norm(W, A, B, s, scale, name, wanted) if c is None else c
    return scale, Operands(W, A, B, m, in_sums(c, x), bias, None)


def check_codes(fn: str, asked: tuple[Any, Any], x: Tensor, weights: dict[str, Any], experts: int, name: str) -> None:
    """Of products of codes. An expert is a cut of them."""
    for which, compute in zip(COMPUTES, asked, strict=True):
        if compute in BLACKWELL:
            raise fail(fn, which, "None or 'fp8'", repr(compute), "dora_linear has it.")
    check_computes(asked, x, weights, "lora")
    on_gpu(fn, asked, x, name)
    for of, W in weights.items():
        rows, N = W.facts.block[0] or 1, W.shape[0] // experts
        if N % rows:
            remedy = "Leave compute out: W is decoded then."
            raise fail(of, "W", f"of blocks that end where an expert of {N} rows does", f"blocks of {rows}", remedy)


def _loop(x: Tensor, layer: DoraLayer, ends: list[int], asked: tuple[Any, Any]) -> Tensor:
    W, A, B, m, s, bias, norm = parts(layer)
    counts = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    *xs, rest = x.split([*counts, x.shape[0] - ends[-1]])
    if any(asked):
        N = B.shape[1]
        each: Any = [cut(W, rows=slice(e * N, (e + 1) * N)) for e in range(len(counts))]
    else:
        each = experts_of(W, len(counts)) if isinstance(W, QuantWeight) else W.unbind()
    biases, norms = (([None] * len(counts)) if t is None else t.unbind() for t in (bias, norm))
    used = [e for e, count in enumerate(counts) if count]
    if not used:  # no rows, but a part of the graph: the gradients are zeros, whatever the norm
        used, norms = [0], norms if norm is not None else [in_sums(m.new_ones(m.shape[1], dtype=torch.float32), W)]
    operands = list(zip(xs, each, A.unbind(), B.unbind(), m.unbind(), strict=True))
    how: dict[str, Any] = {"compute": asked[0], "grad_compute": asked[1], "backend": "eager"}
    ys = [dora_linear(*operands[e], s=s, bias=biases[e], norm=norms[e], **how) for e in used]
    if rest.shape[0]:
        ys.append(ys[0].new_zeros(rest.shape[0], m.shape[1]))
    return ys[0] if len(ys) == 1 else torch.cat(ys)


def count_of(layer: DoraLayer) -> int:
    """How many experts."""
    return parts(layer)[3].shape[0]


def check_experts(fn: str, x: Tensor, layer: DoraLayer) -> bool:
    """Whether they are DTensors, whose parts are checked in their turn."""
    W, A, B, m, s, bias, norm = layer

    def check() -> None:
        texts = "(experts, out, in)", "dora_norm(W, A, B, s=s)"
        if check_stacks(fn, tensors_of(layer, x=x), s, *texts)["E"] < 1:  # type: ignore[arg-type]
            raise fail(fn, "W", "of at least one expert", f"{tuple(W.shape)}", "Stack the weights of the experts.")

    return once(fn, (x, W, A, B, m, bias, norm), (s,), check, W=W)


def check_route(fn: str, x: Tensor, experts: int, offsets: Any, ids: Tensor | None, gates: Tensor | None) -> None:
    """What says which token goes where, but for its values."""
    check_one(fn, offsets, ids, "experts")
    if ids is None:
        if gates is not None:
            raise fail(fn, "gates", "None without ids", "a Tensor", "Multiply y, or pass the ids that they belong to.")
        return
    for arg, t in (("ids", ids), ("gates", gates)):
        if t is not None:
            check_tensor(fn, arg, t)
    check_dtype(fn, "ids", ids, (torch.int64, torch.int32))
    check_device(fn, "x", {"x": x, "ids": ids, "gates": gates})
    if ids.dim() not in (1, 2) or ids.shape[0] != x.shape[0]:
        raise fail(fn, "ids", f"({x.shape[0]}, k), k experts for each token of `x`", tuple(ids.shape), "-1 is no expert.")
    if gates is not None:
        check_dtype(fn, "gates", gates, FLOATS)
        if gates.shape != ids.shape:
            raise fail(fn, "gates", f"{tuple(ids.shape)}, as `ids`", tuple(gates.shape), "One for each expert of a token.")
    wrong = fault(None, ids, x.shape[0], experts)
    if wrong:
        raise fail(fn, "ids", f"from -1 to {experts - 1}", wrong, "They number the experts of `W`.")


def joined(rows: Tensor, ids: Any, gates: Tensor | None, to: Route, name: str) -> Tensor:
    """Sorted rows -> (T, N), or (T, k, N)."""
    one = ids.dim() == 1
    y = combine(rows, gates[:, None] if one and gates is not None else gates, to, name)
    return y.squeeze(1) if one and gates is None else y


def route_of(fn: str, ids: Tensor, experts: int, name: str) -> Route:
    """(T, k) or (T,) -> the pairs of tokens and experts, sorted; kernels do not wait for it."""
    if name != "triton" and not is_real(without_grad(ids)):
        raise fail(
            fn,
            "ids",
            "values that Python can read, in plain torch",
            "compiled or mapped code, or meta tensors",
            "Call it outside, or sort the tokens and pass offsets.tolist().",
        )
    offsets, order, place = route(ids.reshape(-1), experts, name)
    if place is None:
        place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return Route(offsets, order, place.view(ids.shape if ids.dim() == 2 else (-1, 1)))


def ends_on(fn: str, offsets: Any, x: Tensor, experts: int) -> Tensor:
    """(E,) int32 on the device of x. Numbers are copied there; a tensor there is not looked at."""
    if not isinstance(offsets, Tensor):
        return torch.tensor(ends_of(fn, offsets, x.shape[0], experts), dtype=torch.int32, device=x.device)
    _check_offsets(fn, offsets, experts)
    check_device(fn, "x", {"x": x, "offsets": offsets})
    wrong = fault(offsets, None, x.shape[0], experts)
    if wrong:
        raise fail(fn, "offsets", "rising, and the ends of segments of `x`", wrong, "Pass counts.cumsum(0).")
    return offsets.to(torch.int32)


def _check_offsets(fn: str, offsets: Tensor, experts: int) -> None:
    check_dtype(fn, "offsets", offsets, (torch.int64, torch.int32))
    check_shapes(fn, {"offsets": "E"}, {"offsets": offsets})
    _check_count(fn, offsets.shape[0], experts)


def _check_count(fn: str, have: int, experts: int) -> None:
    if have != experts:
        raise fail(fn, "offsets", f"{experts} numbers (the experts of `W`)", have, "The end of each, without a 0 in front.")


def ends_of(fn: str, offsets: Any, tokens: int, experts: int) -> list[int]:
    """On the host."""
    if isinstance(offsets, Tensor):
        _check_offsets(fn, offsets, experts)
        offsets = without_grad(offsets)
        if not is_real(offsets):
            remedy = "Call it outside, or pass offsets.tolist()."
            raise fail(fn, "offsets", "Python numbers in code that is compiled, mapped or on meta", "a Tensor", remedy)
        ends = offsets.tolist()
    else:
        ends = list(offsets) if isinstance(offsets, (list, tuple)) else [None]
        if not all(map(is_int, ends)):
            raise fail(fn, "offsets", "a tensor or a list of whole numbers", repr(offsets), "Pass counts.cumsum(0).")
        _check_count(fn, len(ends), experts)
    if any(b > e for b, e in zip([0, *ends], [*ends, tokens], strict=True)):
        raise fail(fn, "offsets", f"rising from 0 to {tokens} at most (the tokens of `x`)", ends, "Pass counts.cumsum(0).")
    return ends
