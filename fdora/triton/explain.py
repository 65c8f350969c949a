"""Which plans a call has, and what it keeps for backward: the plan makers of a real call, asked with tensors that have no data.

Tensors here are on the meta device: shape, strides, dtype, alignment and requires_grad of a real call's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import Bank, BankNeeds, Dropout, Needs, Operands, Options
from fdora.quant import QuantWeight
from fdora.triton import compose as _compose
from fdora.triton import embedding as _embedding
from fdora.triton import embedding_bwd as _embedding_bwd
from fdora.triton import experts as _experts
from fdora.triton import fp8 as _fp8
from fdora.triton import linear as _linear
from fdora.triton import merge as _merge
from fdora.triton import mlp as _mlp
from fdora.triton import multi as _multi
from fdora.triton import multi_norm as _multi_norm
from fdora.triton import multi_route as _multi_route
from fdora.triton import norm as _norm
from fdora.triton import norm_bwd as _norm_bwd
from fdora.triton import quant as _quant
from fdora.triton import tree as _tree
from fdora.triton.codes import coded_of
from fdora.triton.codes import is_decoded as is_decoded
from fdora.triton.operands import facts, forms_norm
from fdora.triton.operands import flat as flat_of
from fdora.triton.runtime.describe import Described as Described
from fdora.triton.runtime.describe import Row
from fdora.triton.runtime.describe import describe as _describe
from fdora.triton.runtime.device import Device, device_of, of_gpu
from fdora.triton.runtime.plan import Plan
from fdora.triton.runtime.walk import Maker, like
from fdora.triton.small_norm import fits as fits

Layers = Sequence[Operands]


class Parts(NamedTuple):
    """The plans of a call in the order in which they run, and by name what stays until its backward."""

    plans: tuple[Plan, ...]
    kept: dict[str, Tensor]


class Decoding(NamedTuple):
    """A dense W, or its rows one run after the other, made by plain torch."""

    kind: str
    stored: int
    N: int
    K: int
    dtype: torch.dtype


def describe(plan: Plan | Decoding, rates: Any = None) -> Described:
    if not isinstance(plan, Decoding):
        return _describe(plan, rates)
    dense = plan.N * plan.K * plan.dtype.itemsize
    moved = float(plan.stored + dense)
    how = "reads what is stored, writes W; what torch moves between is not counted"
    row = Row("plain torch", how, 0.0, moved, None if rates is None else rates.seconds(0, 0, moved))
    path = f"{plan.kind} ({plan.N}, {plan.K}) to {str(plan.dtype).removeprefix('torch.')}; no kernel reads it here"
    return Described("decoding of W", path, (row,), dense)


def device(where: torch.device | None, capability: int = 0, num_sms: int = 0) -> Device:
    """The facts of a GPU of this machine; without one, of any GPU of these numbers."""
    return of_gpu(0, capability, num_sms) if where is None else device_of(where)


def norm(on: Device, W: Any, A: Tensor, B: Tensor, max_bytes: int | None, squared: bool) -> Plan:
    if isinstance(W, QuantWeight):
        return _plan(on, _quant.plan_quant_norm, (A, B, *W.tensors), coded_of(W), squared)
    return _plan(on, _norm.plan_norm, (W, A, B), max_bytes, squared)


def guarded_norm(on: Device, W: Any, A: Tensor, B: Tensor, max_bytes: int | None, c: Tensor, fingerprint: Tensor) -> Plan:
    if isinstance(W, QuantWeight):
        return _plan(on, _quant.plan_guarded_quant_norm, (A, B, c, fingerprint, *W.tensors), coded_of(W))
    return _plan(on, _norm.plan_guarded_norm, (W, A, B, c, fingerprint), max_bytes, False)


def bank_norm(on: Device, W: Tensor, A: Tensor, B: Tensor, ranks: tuple[int, ...] | None, max_bytes: int | None) -> Plan:
    s = torch.empty(A.shape[0], device="meta")
    return _plan(on, _multi_norm.plan_bank_norm, (W, A, B, s), ranks or (), max_bytes)


def norm_tree(on: Device, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], guarded: bool) -> Plan:
    return _tree.plan_tree(on, W, A, B, guarded)


def route(on: Device, ids: Tensor, adapters: int) -> Plan:
    return _plan(on, _multi_route.plan_route, (ids,), adapters)


def multi(on: Device, x: Tensor, bank: Bank, save_for_dm: bool) -> Parts:
    """Many adapters, each for its own tokens."""
    operands: tuple[Any, ...] = tuple(bank[: _multi.TENSORS])
    ranks = bank.ranks or ()
    forward = _plan(on, _multi.plan_forward, (x, *operands), ranks, bank.p, save_for_dm)
    needs = BankNeeds(*map(_needs, (x, bank.A, bank.B, bank.m, bank.c, bank.bias)))
    if not any(needs):
        return Parts((forward,), {})
    results = _results(forward)
    y, h, *before = results
    kept = before[0] if before else y if save_for_dm else None
    tensors = (y, x, h, kept, *operands)  # dy as y
    backward = _plan(on, _multi.plan_backward, tensors, bool(before), ranks, bank.p, tuple(needs))
    return Parts((forward, backward), _named(forward, results, (h, kept)) | {"x": x})


def spread(on: Device, x: Tensor, order: Tensor, gates: Tensor | None, k: int) -> Plan:
    return _plan(on, _experts.plan_spread, (x, order, gates), k)


def combine(on: Device, rows: Tensor, place: Tensor, gates: Tensor | None) -> Plan:
    return _plan(on, _experts.plan_combine, (rows, place, gates), place.shape[1])


def gates_backward(on: Device, dy: Tensor, rows: Tensor, place: Tensor, dtype: torch.dtype) -> Plan:
    return _plan(on, _experts.plan_gates, (dy, rows, place), place.shape[1], dtype)


def gated(on: Device, z: Tensor, act: str) -> Plan:
    return _plan(on, _experts.plan_gated, (z,), act)


def gated_backward(on: Device, da: Tensor, z: Tensor, act: str) -> Plan:
    return _plan(on, _experts.plan_gated_bwd, (da, z), act)


def merge(on: Device, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, undo: bool) -> Plan:
    return _plan(on, _merge.plan_merge, (W, A, B, m, c), undo)


def embedding(on: Device, ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, per_row: bool) -> Plan:
    return _plan(on, _embedding.plan_embedding, (ids, W, A, B, m, c), per_row)


def norm_backward(on: Device, W: Tensor, A: Tensor, B: Tensor, joined: bool = False) -> list[Plan]:
    """The gradient through a norm, ``joined`` to the factors' own; none where plain torch makes it."""
    if not _norm_bwd.serves(W):
        return []
    c = W.new_empty(W.shape[0], dtype=torch.float32)
    onto = [t.new_empty(t.shape) if joined and _needs(t) else None for t in (A, B)]
    return [_plan(on, _norm_bwd.plan_norm_bwd, (c, W, A, B, c, *onto), (_needs(A), _needs(B)))]


def embedding_backward(
    on: Device, ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, padding_idx: int | None, sparse: bool
) -> Plan | None:
    """Of a norm of columns; None where plain torch makes the gradients. dy has the dtype of W."""
    needs = tuple(map(_needs, (A, B, m, c)))
    if not any(needs) or not _embedding_bwd.serves(ids, A):
        return None
    flat, dy = ids.reshape(-1), W.new_empty((ids.numel(), W.shape[1]))
    key, order = (flat, torch.empty_like(flat, dtype=torch.int64)) if needs[0] else (None, None)
    padding = _embedding_bwd.padding_of(padding_idx, W.shape[0])
    return _plan(on, _embedding_bwd.plan_backward, (dy, flat, W, A, B, m, c, key, order), padding, sparse, needs)


def compose(on: Device, base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, delta: bool) -> Parts:
    forward = _plan(on, _compose.plan_compose, (base, lora, g, bias), delta)
    needs = tuple(_needs(t) for t in (base, lora, g, bias))
    if not any(needs):
        return Parts((forward,), {})
    (y,) = _results(forward)
    backward = _plan(on, _compose.plan_compose_backward, (y, base, lora, g), delta, needs)
    return Parts((forward, backward), {"base": base, "lora": lora, "g": g})


def linear(
    on: Device,
    x: Tensor,
    layers: Layers,
    options: Sequence[Options],
    drop: Dropout,
    fp8: bool = False,
    residual: Tensor | None = None,
) -> Parts:
    """One layer, or several on one x. ``fp8``: one, by products of 8 bits; ``residual``: one, to which this is added."""
    flat, codes = flat_of(layers), _facts(layers)
    saves, s = tuple(o.save for o in options), [o.s for o in options]
    if fp8:
        W, *rest = layers[0]
        forward = _plan(on, _fp8.plan_fp8_linear, (x, *W.tensors, *rest), saves[0], drop.p, W.facts.scale, W.facts.block)
    else:
        ends = () if residual is None else (residual,)
        forward = _plan(on, _linear.plan_forward, (x, *flat, *ends), *drop, saves, _linear.same(s), *codes, len(ends) > 0)
    if not any(map(_needs, (x, *flat))):
        return Parts((forward,), {})
    results = _results(forward)
    ys, saved = _linear.unpacked(results, x, layers, options, drop.mode)
    tensors = (x, saved.h, *ys, *saved.kept, *flat_of(_with_norms(layers, saved.norms)))  # dy as y
    flags = tuple(need for each in _all_needs(layers) for need in each)
    backward = _plan(on, _linear.plan_backward, tensors, *drop, saved.pre_scale, _needs(x), flags, *codes)
    return Parts((forward, backward), _named(forward, results, (saved.h, *saved.kept, *saved.norms)) | {"x": x})


def mlp(on: Device, x: Tensor, layers: Layers, options: Sequence[Options], drop: Dropout, act: str) -> Parts:
    flat, codes = flat_of(layers), _facts(layers)
    saves, s = tuple(o.save for o in options), [o.s for o in options]
    forward = _plan(on, _mlp.plan_forward, (x, *flat), *drop, saves, s[0] == s[1], act, *codes)
    if not any(map(_needs, (x, *flat))):
        return Parts((forward,), {})
    results = _results(forward)
    y, saved, norms = _mlp.unpacked(results, x, layers, saves, drop.mode)
    flags = tuple(need for each in _all_needs(layers) for need in each)
    tensors = (y, x, *saved, *flat_of(_with_norms(layers, norms)))
    backward = _plan(on, _mlp.plan_backward, tensors, *drop, act, _needs(x), flags, *codes)
    return Parts((forward, backward), _named(forward, results, (*saved, *norms)) | {"x": x})


def _facts(layers: Layers) -> tuple[tuple[str, ...], tuple[int, ...]]:
    text, numbers = facts(layers)
    return tuple(text), tuple(numbers)


def _with_norms(layers: Layers, norms: Sequence[Tensor]) -> Layers:
    rest = iter(norms)
    return [la._replace(c=next(rest)) if forms_norm(la) else la for la in layers]


def _plan(on: Device, maker: Maker, tensors: tuple[Tensor | None, ...], *options: Any) -> Plan:
    return maker(tuple(map(like, tensors)), on, *options)


def _results(plan: Plan) -> list[Tensor]:
    return [torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta") for a in plan.results]


def _named(plan: Plan, results: Sequence[Tensor], kept: Iterable[Tensor | None]) -> dict[str, Tensor]:
    names = {id(t): a.name for a, t in zip(plan.results, results, strict=True)}
    return {names[id(t)]: t for t in kept if t is not None}


def _needs(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad and torch.is_grad_enabled()


def _all_needs(layers: Layers) -> list[Needs]:
    return [Needs(*map(_needs, (la.A, la.B, la.m, la.c, la.bias))) for la in layers]
