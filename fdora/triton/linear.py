"""Layers that read one x, as one plan for each direction: which kernels run, in which order. One layer is a group of one.

Half precision. Forward: h = s x A^T, then one product with the low-rank term, g and bias inside (gemm.py; small.py for up to 64
tokens). Backward: one pass for dz and the sums over tokens (scale.py), dh = s dz B, one product for dx; dA = dh^T x and
dB = dz^T h. s is applied where h and dh are rounded, so no other factor is scaled or rounded again. A W of codes
takes g in the place of dy, and so does one that is small beside the tokens (scaled_weight.py).

"peft" dropout, y = x W^T + (g - 1) v + s x' A^T B^T + bias with v = D(x) W^T + s D(x) A^T B^T: two such products, the
first writes v, the second adds (g - 1) v. Its backward is one product: (dz - dy) W and dh A masked, then dy W.

Layers that share x share the product for h where they share s; each adds its dx to that of the one before where it is stored.

A W of codes is decoded in the plan (dequantize.py), once in each direction, into memory that its layers share one after the
other. A layer with an adapter and no norm gets it there: c is one of the results.

float32: products by cuBLAS in the precision that torch.set_float32_matmul_precision asks for; g and bias in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fdora._records import NO_NEEDS, Bound, Dropout, DropoutMode, Grads, Needs, Operands, Options, Saved
from fdora._torch import PLAIN, needs_dispatcher
from fdora.quant import QuantSpec, QuantWeight
from fdora.triton.codes import is_coded
from fdora.triton.copy import dense
from fdora.triton.linear_bwd import backward, by_layer, forms_of_grads
from fdora.triton.linear_fwd import columns_of_h, forward
from fdora.triton.norm_kept import asking
from fdora.triton.op import Likes, planned
from fdora.triton.operands import described, facts, facts_of, flat, forms_norm, norm_forms, read_layers
from fdora.triton.runtime import Array, Builder, numbered
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.scale import Given
from fdora.triton.small import Out, is_small

# forward


def layers_fwd(
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    residual: Tensor | None = None,
    seen: Sequence[Tensor] = (),
    keep: bool = True,
    fp8: bool = False,
) -> tuple[list[Tensor], Saved]:
    """x (..., K) -> each y (..., N), and what backward reads. ``residual``, like the y of a single layer, is added to it.

    ``seen``: of each layer, which comes without c, where its giver is known by (norm.py); ``keep``: give the norms back;
    ``fp8``: every W is of e4m3 codes, and is multiplied by codes of x (fp8.py).
    """
    as_op = needs_dispatcher(x)
    if not as_op and residual is None and len(layers) == 1 and is_ready(layers[0]):
        tensors = (x, *layers[0])
        ys, (h,), kept, pre_scale = layers_bound(tensors, options, drop)(tensors)
        return list(ys), Saved(h, kept, pre_scale)
    run_it: Any = linear if as_op else _linear
    operands = flat(layers)
    s, saves = [o.s for o in options], [o.save for o in options]
    results = run_it(x, operands, s, saves, *drop, *facts(layers), residual, fp8, seen, keep)
    return unpacked(results, x, layers, options, drop.mode, keep)


def is_ready(la: Operands) -> bool:
    return la.A is not None and la.c is not None and type(la.W) is not QuantWeight


def layers_bound(
    tensors: tuple[Tensor | None, ...],
    options: Sequence[Options],
    drop: Dropout,
    specs: Sequence[QuantSpec | None] = (),
    fp8: bool = False,
) -> Bound:
    """The same for plain tensors where nothing traces, every layer with an adapter and c: the host's short way. ``specs``: of
    each W, whose tensors lie behind all operands where it is codes."""
    scalars, saves = zip(*options, strict=True)
    rounds = (False, True) if fp8 else ()
    plan = plan_for(plan_forward, tensors, *drop, saves, same(scalars), *facts_of(specs), *rounds)
    n, names = len(options), [each.name for each in plan.results]
    pre = tuple([f"pre_scale{i}" in names for i in range(n)])
    places = [names.index(f"pre_scale{i}") if pre[i] else None if save == "nothing" else i for i, save in enumerate(saves)]

    def bound(tensors: tuple[Tensor | None, ...]) -> Any:
        results = run(plan, tensors, scalars)
        kept = tuple([None if at is None else results[at] for at in places])
        return results[:n], (results[n],), kept, pre

    return bound


def unpacked(
    results: Sequence[Any], x: Tensor, layers: Sequence[Any], options: Sequence[Options], mode: str, norms: bool = True
) -> tuple[list[Any], Saved]:
    """What a forward returns, as each y and what backward reads."""
    n = len(layers)
    ys, rest = list(results[:n]), results[n:]
    h = None
    if any([la.A is not None for la in layers]):
        h, *rest = rest
    formed = len(rest) - (sum(map(forms_norm, layers)) if norms else 0)
    rest, cs = rest[:formed], tuple(rest[formed:])
    kept = [None if o.save == "nothing" else y for y, o in zip(ys, options, strict=True)]
    pre = (False,) * n
    if rest:
        tokens = rows_of(x)
        pre = tuple([saves_pre_scale(x.dtype, tokens, la, mode, o.save) for la, o in zip(layers, options, strict=True)])
        before = iter(rest)
        kept = [next(before) if has else y for y, has in zip(kept, pre, strict=True)]
    return ys, Saved(h, tuple(kept), pre, cs)


def _divided(x, operands, s, saves, p, mode, text, numbers, residual=None, fp8=False) -> tuple[tuple, tuple, tuple]:
    tensors, s = (x, *operands), tuple(s)
    options: tuple[Any, ...] = (p, mode, tuple(saves), same(s), tuple(text), tuple(numbers))
    if residual is not None:
        tensors, options = (*tensors, residual), (*options, True)
    elif fp8:
        options = (*options, False, True)
    return tensors, options, s


def same(s: Sequence[float]) -> bool:
    return s.count(s[0]) == len(s)


def saves_pre_scale(dtype: torch.dtype, tokens: int, la: Any, mode: str, save: str) -> bool:
    """Whether y cannot stand in for the value before g. In half precision also columns with g near 0 can: backward
    redoes them (scale.py).

    It reads W for that; of codes few tokens need no dense W for anything else, and they cost nothing to keep.
    """
    exact = (la.seed is None or mode != "peft") and dtype != torch.float32 and la.bias is None
    exact = exact and not (is_coded(la.W) and is_small(tokens))
    return la.A is not None and (save == "pre_scale" or (save == "output" and not exact))


def _results(
    x: Any, likes: Likes, p: float, mode: str, saves: Sequence[str], same_s: bool, text: Any = (), numbers: Any = (), *_: Any
) -> dict[str, Any]:
    """What a forward returns: each y, h of all layers, what is saved before g of each, and norms."""
    M, t, layers = rows_of(x), x.dtype, described(likes, len(saves), text, numbers)
    widths, total = [la.W.shape[0] for la in layers], sum(la.A.shape[0] for la in layers if la.A is not None)
    pre = [saves_pre_scale(t, M, la, mode, save) for la, save in zip(layers, saves, strict=True)]
    return {
        **numbered("y", [((*x.shape[:-1], N), t) for N in widths]),
        "h": ((M, total), t) if total else None,
        **numbered("pre_scale", [((M, N), t) if has else None for N, has in zip(widths, pre, strict=True)]),
        **norm_forms(layers),
    }


@planned("", "dora_linear forward", "tokens rest", _results, has_families=True)
def plan_forward(
    plan: Builder,
    x: Array,
    likes: Likes,
    p: float,
    mode: DropoutMode,
    saves: tuple[str, ...],
    same_s: bool,
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
    has_residual: bool = False,
    fp8: bool = False,
) -> None:
    """likes: the operands, and behind them a residual."""
    n = len(saves)
    plan.name = plan.name if n == 1 else f"forward of {n} layers on one x"
    layers = read_layers(plan, x.dtype, likes, n, text, numbers)
    residual = dense(plan, plan.tokens(likes[-1])) if has_residual else None
    scalars = [plan.scalar(f"s{i}") for i in range(n)]
    results = plan.wanted()
    ys, h, pre, norms = [y.flat() for y in results[:n]], results[n], results[n + 1 : -n], results[-n:]
    out = [Out(*each) for each in zip(ys, columns_of_h(h, layers), pre, norms, strict=True)]
    forward(plan, x, layers, scalars, out, h, Dropout(p, mode), same_s, residual, fp8)


# backward


def layers_bwd(
    dys: Sequence[Tensor | None],
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    saved: Saved,
    need_x: bool,
    needs: Sequence[Needs],
    fp8: bool = False,
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of each layer; those of bias in float32. A dy of None: nobody asked for this y. ``fp8``: dx by
    products of e4m3 codes (fp8.py)."""
    wanted = [NO_NEEDS if dy is None else need for dy, need in zip(dys, needs, strict=True)]
    flags = [need for each in wanted for need in each]
    seen = any([type(dy) not in PLAIN for dy in dys if dy is not None])
    run_it = plan_backward.op if seen else plan_backward.call
    scalars, coded = [o.s for o in options], facts(layers)
    of = (x, saved.h, dys, saved.kept, flat(layers), scalars, *drop, saved.pre_scale, need_x, flags, *coded, fp8)
    results = iter(run_it(*of))
    dx = next(results) if need_x else None
    return dx, [Grads._make([next(results) if need else None for need in each]) for each in wanted]


def _gradients(
    x: Any, h: Any, likes: Likes, p: float, mode: str, pre_scale: Sequence[bool], need_x: bool, needs: Sequence[bool], *_: Any
) -> dict[str, Any]:
    return forms_of_grads(x, likes[2 * len(pre_scale) :], need_x, needs)


@planned(
    "linear_backward(Tensor x, Tensor? h, Tensor?[] dys, Tensor?[] kept, Tensor?[] operands, float[] s, float p, str mode, "
    "bool[] pre_scale, bool need_x, bool[] needs, str[] text, SymInt[] numbers, bool fp8) -> Tensor[]",
    "dora_linear backward",
    "tokens operand rest",
    _gradients,
    has_families=True,
)
def plan_backward(
    plan: Builder,
    x: Array,
    h: Array,
    likes: Likes,
    p: float,
    mode: DropoutMode,
    pre_scale: tuple[bool, ...],
    need_x: bool,
    needs: tuple[bool, ...],
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
    fp8: bool = False,
) -> None:
    """likes: each dy, what is kept of each y, the operands."""
    n = len(pre_scale)
    plan.name = plan.name if n == 1 else f"backward of {n} layers on one x"
    dys, kept = ([*map(plan.tokens, some)] for some in (likes[:n], likes[n : 2 * n]))
    layers = read_layers(plan, x.dtype, likes[2 * n :], n, text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(n)]
    (dx, *grads), hs, drops = plan.wanted(), columns_of_h(h, layers), [Dropout(p, mode)] * n
    parts = [*map(Given, dys, [x] * n, layers, scalars, hs, kept, pre_scale, by_layer(Grads, grads), drops)]
    backward(plan, [of._replace(fp8=fp8) for of in parts], dx and dx.flat())


def rows_of(x: Any) -> int:
    """Tokens."""
    return prod(x.shape[:-1])


linear, _linear = asking(
    plan_forward,
    "linear(Tensor x, Tensor?[] operands, float[] s, str[] saves, float p, str mode, str[] text, SymInt[] numbers, "
    "Tensor? residual, bool fp8, Tensor[] seen, bool keep) -> Tensor[]",
    _divided,
)
