"""Autograd of a layer with many adapters: one node. Which tokens are whose is settled before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import Bank, BankNeeds, DropoutMode, Operands
from fdora._torch import apply, detached, no_graph
from fdora.autograd import quant
from fdora.autograd._ops import OPS, autocast_off, autocast_on, gradients_of, reread
from fdora.autograd.weight import Specs, dense_in, flat_of, layers_of, specs_of
from fdora.eager._matmul import is_plain
from fdora.eager.linear import as_matrix
from fdora.quant import QuantWeight

COUNTED = 16384  # tokens: kernels compare each with each, a sort does not; not measured on a GPU
REMEDY = "Write `y = c * y` in the place of what changes it."


class Tokens(NamedTuple):
    """Which tokens are whose, see :class:`fdora._records.Bank`."""

    s: Tensor
    offsets: Any
    order: Tensor | None = None
    ids: Tensor | None = None


class Call(NamedTuple):
    """What is no tensor in a call."""

    ranks: tuple[int, ...] | None
    p: float
    save_for_dm: bool
    backend: str
    specs: Specs = None
    """Of a quantised weight; :func:`multi` fills it in."""
    fn: str = "dora_linear_multi"
    experts: bool = False
    """Each adapter has a W of its own; a quantised one is (G N, K)."""
    mode: DropoutMode = "lora"
    fp8: bool = False
    """Forward multiplies 8-bit numbers, and W is a QuantWeight of e4m3."""
    fp8_grad: bool = False
    """The same of backward, for dx."""


def multi(x: Tensor, bank: Operands, tokens: Tokens, call: Call) -> Tensor:
    """x (..., K) -> y (..., N). Each tensor of ``bank`` but W and bias has one more axis, of adapters; of experts these too."""
    flat = as_matrix(x)
    if no_graph() and not autocast_on(x):
        y: Tensor = OPS[call.backend].multi_fwd(flat, bank_of(call, tokens, bank, x.dtype, call.fp8), False)[0]
    else:
        specs = specs_of([bank])
        if specs is not None:
            ranks, p, saves, backend, _, fn, experts, mode, fp8, fp8_grad = call
            call = Call(ranks, p, saves, backend, specs, fn, experts, mode, fp8, fp8_grad)
        y = apply(Multi, flat, call, *tokens, *flat_of([bank], specs))[0]
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def gated_multi(x: Tensor, banks: Sequence[Operands], tokens: Sequence[Tokens], calls: Sequence[Call], act: str) -> Tensor:
    """f(gate) up of two layers as of :func:`multi`, in order of their tokens; W dense, without bias, m and c there."""
    s, offsets = tokens[0][:2]
    flat = as_matrix(x)
    a: Tensor = apply(GatedMulti, flat, tuple(calls), act, s, offsets, tokens[1].s, *flat_of(banks, None))[0]
    return a if x.dim() == 2 else a.reshape(*x.shape[:-1], a.shape[-1])


def route(ids: Tensor, adapters: int, backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """offsets, order and, where it costs nothing, its inverse, from the adapter of each token; nobody waits for the device."""
    return OPS[backend if ids.shape[0] <= COUNTED else "eager"].route(ids, adapters)


def tokens_by(ids: Tensor, s: Tensor, x: Tensor, A: Tensor, p: float, backend: str) -> Tokens:
    """Sorted, if forward asks for that."""
    ids, any_order = ids.reshape(-1), OPS[backend].any_order
    if any_order is not None and any_order(ids.shape[0], x.dtype, A, p):
        return Tokens(s, None, None, ids)
    return Tokens(s, *route(ids, A.shape[0], backend)[:2])


def fault(offsets: Tensor | None, ids: Tensor | None, tokens: int, adapters: int) -> str:
    """What is wrong with the values, where they can be read for free."""
    if offsets is not None and is_plain(offsets):
        ends = offsets.tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > tokens:
            return f"{ends} for {tokens} tokens"
    if ids is not None and is_plain(ids) and ids.numel():
        low, high = ids.aminmax()
        if low < -1 or high >= adapters:
            return f"{low.item()} to {high.item()}"
    return ""


def bank_norm(W: Tensor | QuantWeight, A: Tensor, B: Tensor, s: Tensor, ranks: tuple[int, ...] | None, backend: str) -> Tensor:
    """c (G, N) of all adapters, detached."""
    W, A, B, s = detached(W, A, B, s)
    with torch.no_grad(), autocast_off(A):
        if not isinstance(W, QuantWeight):
            return OPS[backend].bank_norm(W, A, B, s, ranks, None)
        rows = quant.rows_of(W)
        parts = [
            OPS[backend].bank_norm(rows(i, j), A, B[:, i:j], s, ranks, budget) for i, j, budget in quant.norm_parts(W, None)
        ]
        return torch.cat(parts, 1)


def experts_norm(
    W: Tensor | QuantWeight, A: Tensor, B: Tensor, s: float, scale: Tensor, backend: str, wanted: Sequence[bool] = ()
) -> Tensor:
    """c (E, N), detached; ``scale`` is s of each. ``wanted``: as of quant.stack_norms, of codes."""
    if not isinstance(W, QuantWeight):
        return bank_norm(W, A, B, scale, None, backend)
    A, B = detached(A, B)
    with torch.no_grad(), autocast_off(A):
        return quant.stack_norms(W, A, B, s, backend, wanted)


def bank_of(call: Call, tokens: Tokens, layer: Operands, dtype: torch.dtype, fp8: bool = False) -> Bank:
    """W is dense and in the dtype of the products: codes are decoded here, and autocast's copy is made once for all. ``fp8``:
    they are multiplied as they are."""
    W, A, B, m, c, bias, seed = layer
    assert A is not None and B is not None
    if fp8:
        return Bank(W, A, B, m, c, bias, *tokens, seed, call.ranks, call.p, call.experts, call.mode)
    if isinstance(W, QuantWeight):
        lazily = call.experts and call.backend == "eager"  # the products round W[e]: no copy of all W stands beside what f gave
        W = quant.decoded(W) if lazily else dense_in(W.spec, W.tensors, dtype, call.backend)
        W = W.unflatten(0, tuple(B.shape[:2])) if call.experts else W
        dtype = W.dtype if lazily else dtype
    return Bank(W if W.dtype == dtype else W.to(dtype), A, B, m, c, bias, *tokens, seed, call.ranks, call.p, False, call.mode)


class Multi(torch.autograd.Function):
    """Saves x, h and, for the gradient of m, the output itself or what the backend asks for; the operands are the caller's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, call: Call, s: Tensor, offsets: Any, order: Any, ids: Any, *flat: Tensor | None) -> Any:
        tokens = Tokens(s, offsets, order, ids)
        with autocast_off(x):
            bank = bank_of(call, tokens, layers_of(flat, call.specs)[0], x.dtype, call.fp8)
            y, h, kept = OPS[call.backend].multi_fwd(x, bank, call.save_for_dm)
        return y, h, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.call, *tensors = inputs
        y, h, *kept = output
        ctx.mark_non_differentiable(h, *kept)
        ctx.set_materialize_grads(False)
        if ctx.call.save_for_dm and not kept:
            kept = [y]
        ctx.kept = len(kept)
        ctx.save_for_backward(x, h, *kept, *tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        flags = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(flags)
        call, saved = ctx.call, reread(ctx, ctx.call.fn, REMEDY)
        needs = BankNeeds(flags[0], *flags[7:12])
        dx, *grads = gradients_of(call.fn, needs, _backward, dy, call, ctx.kept, needs, *saved)
        #      x   call, s, offsets, order, ids, W  A B m c bias   seed and packed tensors
        return dx, *[None] * 6, *grads, *[None] * (len(flags) - 12)


def _backward(dy: Tensor, call: Call, count: int, needs: BankNeeds, x: Tensor, *saved: Any) -> Any:
    h, *rest = saved
    kept, tokens, layer = rest[:count], Tokens(*rest[count : count + 4]), layers_of(rest[count + 4 :], call.specs)[0]
    if tokens.ids is not None:  # what forward left in their order
        assert layer.A is not None
        offsets, order, _ = route(tokens.ids, layer.A.shape[0], call.backend)
        tokens, h = Tokens(tokens.s, offsets, order), h[order]
        kept = [kept[0][order], kept[1]] if count == 2 else kept
    bank = bank_of(call, tokens, layer, x.dtype, call.fp8_grad)
    return OPS[call.backend].multi_bwd(dy, x, bank, h, tuple(kept), needs)


class GatedMulti(torch.autograd.Function):
    """``f(gate) up`` of two banks on one x, by a backend that has multi_gated_bwd. Saves x, h of both, gate and up.
    Their dz are formed where the activation's gradient is, and d gate and d up are never there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, calls: tuple[Call, Call], act: str, s: Any, offsets: Any, s_up: Any, *flat: Tensor | None) -> Any:
        with autocast_off(x):
            ops, banks = OPS[calls[0].backend], _pair_of(calls, (s, s_up), offsets, flat, x.dtype)
            (gate, h, _), (up, h_up, _) = (ops.multi_fwd(x, bank, True) for bank in banks)
            return ops.act_fwd(gate, up, act), gate, up, h, h_up

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.calls, ctx.act, *tensors = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *output[1:], *tensors)

    @staticmethod
    def backward(ctx: Any, da: Tensor | None, *_: Any) -> Any:
        flags = ctx.needs_input_grad
        if da is None:
            return (None,) * len(flags)
        needs = [BankNeeds(flags[0], *flags[i + 1 : i + 6]) for i in (6, 6 + len(Operands._fields))]
        wanted = [flags[0], *needs[0][1:], *needs[1][1:]]
        found = gradients_of(ctx.calls[0].fn, wanted, _gated_backward, da, ctx.calls, ctx.act, needs, *ctx.saved_tensors)
        dx, *grads = found
        #      x   calls, act, s, offsets, s_up    W    A B m c bias   seed
        return dx, *[None] * 6, *grads[:5], None, None, *grads[5:], None


def _pair_of(calls: Any, s: Any, offsets: Any, flat: Sequence[Tensor | None], dtype: torch.dtype) -> list[Bank]:
    both = zip(calls, s, layers_of(flat, None), strict=True)
    return [bank_of(call, Tokens(own, offsets), layer, dtype) for call, own, layer in both]


def _gated_backward(da: Tensor, calls: Any, act: str, needs: Sequence[BankNeeds], x: Tensor, *saved: Any) -> Any:
    gate, up, h, h_up, s, offsets, s_up, *flat = saved
    ops, banks = OPS[calls[0].backend], _pair_of(calls, (s, s_up), offsets, flat, x.dtype)
    assert ops.multi_gated_bwd is not None
    results = ops.multi_gated_bwd(da, gate, up, x, (h, h_up), banks, act, needs)
    dzs = next(results), next(results)
    sums = [tuple(next(results) if need else None for need in (each.m, each.c)) for each in needs]
    dx, grads = None, []
    for dz, call, bank, own, need, of_m in zip(dzs, calls, banks, (h, h_up), needs, sums, strict=True):
        layer = Operands(bank.W, bank.A, bank.B, None, None, None, bank.seed)
        plain, rest = (
            bank_of(call, Tokens(bank.s, offsets), layer, x.dtype),
            BankNeeds(need.x, need.A, need.B, False, False, False),
        )
        d, dA, dB, *_ = ops.multi_bwd(dz, x, plain, own, (), rest, True)
        dx = d if dx is None else dx.add_(d)
        grads += [dA, dB, *of_m, None]
    return dx, *grads
