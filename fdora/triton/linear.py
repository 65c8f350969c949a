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

from fdora._records import NO_NEEDS, Bound, Dropout, DropoutMode, Grads, Needs, Operands, Options, Saved, layers_in
from fdora._torch import PLAIN, needs_dispatcher
from fdora.quant import QuantWeight
from fdora.triton.codes import is_coded
from fdora.triton.copy import dense
from fdora.triton.linear_bwd import backward, forms_of_grads, result_grads
from fdora.triton.linear_fwd import columns_of_h, forward, result_h
from fdora.triton.norm_kept import run_asking
from fdora.triton.op import op, planned
from fdora.triton.operands import (
    Likes,
    any_norms,
    facts,
    fake_layers,
    fake_norms,
    flat,
    forms_norm,
    norms_of,
    read_layers,
    with_norms,
)
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.plan import Plan
from fdora.triton.runtime.walk import plan_for, run
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
) -> tuple[list[Tensor], Saved]:
    """x (..., K) -> each y (..., N), and what backward reads. ``residual``, like the y of a single layer, is added to it.

    ``seen``: of each layer, which comes without c, where its giver is known by (norm.py); ``keep``: give the norms back.
    """
    as_op = needs_dispatcher(x)
    if not as_op and residual is None and len(layers) == 1 and is_ready(layers[0]):
        tensors = (x, *layers[0])
        ys, (h,), kept, pre_scale = layers_bound(tensors, options, drop)(tensors)
        return list(ys), Saved(h, kept, pre_scale)
    run_it: Any = linear if as_op else _linear
    operands = flat(layers)
    s, saves = [o.s for o in options], [o.save for o in options]
    results = run_it(x, operands, s, saves, *drop, *facts(layers), residual, seen, keep)
    return unpacked(results, x, layers, options, drop.mode, keep)


def is_ready(la: Operands) -> bool:
    return la.A is not None and la.c is not None and type(la.W) is not QuantWeight


def layers_bound(tensors: tuple[Tensor | None, ...], options: Sequence[Options], drop: Dropout) -> Bound:
    """The same for plain tensors where nothing traces, every layer with a dense W, an adapter and c: the host's short way."""
    scalars, saves = zip(*options, strict=True)
    plan = plan_for(plan_forward, tensors, *drop, saves, same(scalars), (), ())
    n = len(options)
    pre = (False,) * n
    if len(plan.results) > n + 1:
        x: Any = tensors[0]
        layers, tokens = layers_in(tensors[1:]), rows_of(x)
        pre = tuple([saves_pre_scale(x.dtype, tokens, la, drop.mode, save) for la, save in zip(layers, saves, strict=True)])
    places = tuple([n + sum(pre[: i + 1]) if pre[i] else None if save == "nothing" else i for i, save in enumerate(saves)])

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


def _linear(x, operands, s, saves, p, mode, text, numbers, residual, seen, keep) -> tuple[Tensor, ...]:
    """Each y, h if there is any, each value before g that is saved, each norm that nobody gave."""
    given: tuple[Tensor, ...] = run_asking(_planned, seen, keep, x, operands, s, saves, p, mode, text, numbers, residual)
    return given


def _planned(x, operands, s, saves, p, mode, text, numbers, residual, seen=(), keep=True):
    operands = with_norms(operands, any_norms(operands)) if seen else operands  # who counts flops has not asked
    tensors, s = (x, *operands), tuple(s)
    options = (p, mode, tuple(saves), same(s), tuple(text), tuple(numbers))
    if residual is not None:
        tensors, options = (*tensors, residual), (*options, True)
    return plan_for(plan_forward, tensors, *options), tensors, s


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


def plan_forward(
    likes: Likes,
    device: Device,
    p: float,
    mode: DropoutMode,
    saves: tuple[str, ...],
    same_s: bool,
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
    has_residual: bool = False,
) -> Plan:
    """likes: x, the operands, and behind them a residual."""
    plan = Builder("dora_linear forward" if len(saves) == 1 else f"forward of {len(saves)} layers on one x", device)
    x = plan.tokens(likes[0])
    layers = read_layers(plan, x.dtype, likes[1:], len(saves), text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(len(layers))]
    (*lead, _), dtype = likes[0].shape, x.dtype
    ys = [plan.result(f"y{i}", (*lead, la.W.shape[0]), dtype).flat() for i, la in enumerate(layers)]
    h = result_h(plan, x, layers, "h")
    pre = [
        plan.result(f"pre_scale{i}", y.shape, dtype) if saves_pre_scale(dtype, x.shape[0], la, mode, save) else None
        for i, (y, la, save) in enumerate(zip(ys, layers, saves, strict=True))
    ]
    out = [Out(*each) for each in zip(ys, h.parts, pre, norms_of(plan, layers), strict=True)]
    residual = dense(plan, plan.tokens(likes[-1])) if has_residual else None
    forward(plan, x, layers, scalars, out, h.whole, Dropout(p, mode), same_s, residual)
    return plan.plan()


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
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of each layer; those of bias in float32. A dy of None: nobody asked for this y."""
    wanted = [NO_NEEDS if dy is None else need for dy, need in zip(dys, needs, strict=True)]
    flags = [need for each in wanted for need in each]
    seen = any([type(dy) not in PLAIN for dy in dys if dy is not None])
    run_it: Any = linear_backward if seen else _linear_backward
    scalars = [o.s for o in options]
    operands = flat(layers)
    results = iter(
        run_it(x, saved.h, dys, saved.kept, operands, scalars, *drop, saved.pre_scale, need_x, flags, *facts(layers))
    )
    dx = next(results) if need_x else None
    return dx, [Grads._make([next(results) if need else None for need in each]) for each in wanted]


def plan_backward(
    likes: Likes,
    device: Device,
    p: float,
    mode: DropoutMode,
    pre_scale: tuple[bool, ...],
    need_x: bool,
    needs: tuple[bool, ...],
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
) -> Plan:
    n = len(pre_scale)
    plan = Builder("dora_linear backward" if n == 1 else f"backward of {n} layers on one x", device)
    x = plan.tokens(likes[0])
    h = plan.operand(likes[1])
    dys = [plan.tokens(like) for like in likes[2 : 2 + n]]
    kept = [plan.tokens(like) for like in likes[2 + n : 2 + 2 * n]]
    layers = read_layers(plan, x.dtype, likes[2 + 2 * n :], n, text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(n)]
    dx = plan.result("dx", likes[0].shape, x.dtype).flat() if need_x else None
    grads = result_grads(plan, layers, needs)
    dropout = Dropout(p, mode)
    backward(plan, dys, x, layers, scalars, columns_of_h(h, layers).parts, kept, pre_scale, dropout, dx, grads)
    return plan.plan()


# the same as ops that torch sees


def _fake_linear(x, operands, s, saves, p, mode, text, numbers, residual, seen, keep):
    layers = fake_layers(operands, len(saves), text, numbers)
    ys = [x.new_empty((*x.shape[:-1], la.W.shape[0])) for la in layers]
    M, total = rows_of(x), sum(la.A.shape[0] for la in layers if la.A is not None)
    kept = [la.W.shape[0] for la, save in zip(layers, saves, strict=True) if saves_pre_scale(x.dtype, M, la, mode, save)]
    made = [*ys, *([x.new_empty((M, total))] if total else []), *(x.new_empty((M, N)) for N in kept)]
    return made + fake_norms(x, layers) if keep else made


def rows_of(x: Tensor) -> int:
    """Tokens."""
    return prod(x.shape[:-1])


linear = op(
    "linear",
    "(Tensor x, Tensor?[] operands, float[] s, str[] saves, float p, str mode, str[] text, SymInt[] numbers, "
    "Tensor? residual, Tensor[] seen, bool keep) -> Tensor[]",
    _linear,
    _fake_linear,
    _planned,
)
# dx if it is needed, then what is needed of each layer's dA, dB, dm, dc, dbias
linear_backward, _linear_backward = planned(
    "linear_backward",
    "(Tensor x, Tensor? h, Tensor?[] dys, Tensor?[] kept, Tensor?[] operands, float[] s, float p, str mode, bool[] pre_scale, "
    "bool need_x, bool[] needs, str[] text, SymInt[] numbers) -> Tensor[]",
    plan_backward,
    lambda x, h, dys, kept, operands, s, p, mode, pre_scale, need_x, needs, *_: forms_of_grads(x, operands, need_x, needs),
)
