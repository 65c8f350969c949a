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
NOTHING = BankNeeds(False, False, False, False, False, False)
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
        y = node(flat, [bank], [tokens], [call], "")[0]
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def several(
    x: Tensor, banks: Sequence[Operands], tokens: Sequence[Tokens], calls: Sequence[Call], act: str = ""
) -> Sequence[Tensor]:
    """y of each layer as :func:`multi` gives it, in one node; with ``act`` f(first) second. They have the same tokens, backend
    and kinds of operands; beside ``act`` W is dense, m and c are there and a bias is not."""
    if no_graph() and not autocast_on(x):
        found = [multi(x, *of) for of in zip(banks, tokens, calls, strict=True)]
        return [OPS[calls[0].backend].act_fwd(*found, act)] if act else found
    ys = node(as_matrix(x), banks, tokens, calls, act)[: 1 if act else len(calls)]
    return [y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys]


def node(x: Tensor, banks: Sequence[Operands], tokens: Sequence[Tokens], calls: Sequence[Call], act: str) -> Sequence[Tensor]:
    specs = specs_of(banks)
    flat = *[t.s for t in tokens], *flat_of(banks, specs)
    found: Sequence[Tensor] = apply(Multi, x, tuple(calls), act, specs, *tokens[0][1:], *flat)
    return found


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
    """Layers on one x whose tokens are the same, and beside ``act`` f(first) second. Saves x, h and, for the gradient of m, the
    outputs themselves or what the backend asks for; the operands are the caller's. dx of one is added to that of the next where
    it is written. Beside ``act`` the backend has multi_gated_bwd: dz are formed where the activation's gradient is, and d first
    and d second are never there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, calls: tuple[Call, ...], act: str, specs: Specs, offsets: Any, order: Any, ids: Any, *rest: Any
    ) -> Any:
        n, ops = len(calls), OPS[calls[0].backend]
        ys: list[Tensor] = []  # Dynamo takes no list[Tensor]()
        hs: list[Tensor] = []
        kept: list[Tensor] = []
        saves = any([call.save_for_dm for call in calls])
        with autocast_off(x):
            for call, s, layer in zip(calls, rest, layers_of(rest[n:], specs), strict=False):
                bank = bank_of(call, Tokens(s, offsets, order, ids), layer, x.dtype, call.fp8)
                y, h, more = ops.multi_fwd(x, bank, saves)
                ys.append(y)
                hs.append(h)
                kept.extend(more)
            first = (ops.act_fwd(*ys, act),) if act else ()
        return *first, *ys, *hs, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.calls, ctx.act, ctx.specs, *tensors = inputs
        n, ys = len(ctx.calls), output[1:] if ctx.act else output
        ctx.mark_non_differentiable(*(ys if ctx.act else ys[n:]))
        ctx.set_materialize_grads(False)
        kept = ys[2 * n :] or (ys[:n] if ctx.act or any([call.save_for_dm for call in ctx.calls]) else ())
        ctx.count = len(kept) // n
        ctx.save_for_backward(x, *ys[n : 2 * n], *kept, *tensors)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        flags, calls, act = ctx.needs_input_grad, ctx.calls, ctx.act
        n = len(calls)
        dys = dys[: 1 if act else n]
        if not any([dy is not None for dy in dys]):
            return (None,) * len(flags)
        places = [7 + n + i * len(Operands._fields) for i in range(n)]
        needs = [BankNeeds(flags[0], *flags[at + 1 : at + 6]) for at in places]
        if not act:
            needs = [NOTHING if dy is None else need for dy, need in zip(dys, needs, strict=True)]
        wanted = [flags[0], *[need for each in needs for need in each[1:]]]
        saved = reread(ctx, calls[0].fn, REMEDY)
        how = calls, act, ctx.specs, ctx.count, needs
        dx, *grads = gradients_of(calls[0].fn, wanted, _backward, saved[0], *how, *dys, *saved[1:])
        of_layers = [each for i in range(n) for each in (None, *grads[5 * i : 5 * i + 5], None)]  # W; A, B, m, c, bias; seed
        return dx, *[None] * (places[0] - 1), *of_layers, *[None] * (len(flags) - places[0] - len(of_layers))


def _backward(
    x: Tensor, calls: Sequence[Call], act: str, specs: Specs, count: int, needs: Sequence[BankNeeds], *rest: Any
) -> tuple[Tensor | None, ...]:
    n, ops = len(calls), OPS[calls[0].backend]
    dys, hs, kept, (offsets, order, ids), scales, flat = parted(rest, 1 if act else n, n, count * n, 3, n)
    layers = layers_of(flat, specs)
    if ids is not None:  # what forward left in their order
        assert layers[0].A is not None
        offsets, order, _ = route(ids, layers[0].A.shape[0], calls[0].backend)
        hs = [h[order] for h in hs]
        kept = [each[order] if i % 2 == 0 else each for i, each in enumerate(kept)] if count == 2 else kept
    tokens = [Tokens(s, offsets, order) for s in scales]
    sums: Any = ()
    if act:
        assert ops.multi_gated_bwd is not None
        banks = [bank_of(*of, x.dtype) for of in zip(calls, tokens, layers, strict=True)]
        results = ops.multi_gated_bwd(*dys, *kept, x, hs, banks, act, needs)
        dys = next(results), next(results)
        sums = [[next(results) if need else None for need in (each.m, each.c)] for each in needs]
        layers = [Operands(la.W, la.A, la.B, None, None, None, la.seed) for la in layers]
        needs = [BankNeeds(need.x, need.A, need.B, False, False, False) for need in needs]
        count = 0
    grads: list[Any] = []
    dx = None
    for i, (dy, call, of, layer, h, need) in enumerate(zip(dys, calls, tokens, layers, hs, needs, strict=True)):
        own: Sequence[Tensor | None] = (None,) * 5
        if dy is not None:
            bank, before = bank_of(call, of, layer, x.dtype, call.fp8_grad), tuple(kept[i * count : (i + 1) * count])
            more = (bool(act), dx) if n > 1 else ()
            dx, *own = ops.multi_bwd(dy, x, bank, h, before, need, *more)
        grads += [*own[:2], *sums[i], None] if act else own
    return dx, *grads


def parted(tensors: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """So many, one behind the other, and the rest."""
    found, at = [], 0
    for count in counts:
        found.append(tensors[at : at + count])
        at += count
    return [*found, tensors[at:]]
