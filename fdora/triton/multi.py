"""Many adapters on one W, each for its own tokens, as one plan for each direction; formulas: fdora/eager/multi.py.

Half precision. Forward: h = s_a x A_a^T by segments, then one product for all tokens with the low-rank terms, g and bias inside
(multi_gemm.py); up to 64 tokens: multi_small.py. Backward: multi_bwd.py. Inside, tokens are sorted; what comes in another
order is copied into it and back. float32, and the dx of a call with dropout: the product by cuBLAS, the rest in one pass.

W of three axes, and a bias of two: each adapter is an expert with a W of its own. The same plans with another grouping of the
rows into tiles (multi_gemm.py); float32 then is a Triton product too, since cuBLAS would want lengths.

Nothing asks for a length: grids depend on M, G and shapes alone. What is not finite in an adapter makes its own tokens NaN (all
of them by TMA) and nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import Bank, BankNeeds
from fdora._torch import needs_dispatcher
from fdora.triton.copy import in_dtype, operand
from fdora.triton.multi_bwd import Given, Out, backward
from fdora.triton.multi_gemm import (
    Right,
    Wanted,
    copies_beside,
    lay,
    low_rank_input,
    multi_gemm,
    routes,
    shape_of,
    turned,
)
from fdora.triton.multi_norm import bank_norm as bank_norm
from fdora.triton.multi_route import route as route
from fdora.triton.multi_rows import drop, rank_table, sort, unsort
from fdora.triton.multi_small import multi_small
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.plan import Like, Plan
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.small import LIMIT, is_small

TENSORS = 10  # of a bank; behind them ranks and p
BankGrads = tuple[Tensor | None, ...]


def multi_fwd(x: Tensor, bank: Bank, save_for_dm: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """x (M, K) -> y (M, N), h = s_a x A_a^T (M, r) in sorted order, and what dm reads beside h: nothing where y will do."""
    run_it: Any = multi if needs_dispatcher(x) else _multi
    y, h, *before = run_it(x, list(bank[:TENSORS]), list(bank.ranks or ()), bank.p, save_for_dm)
    return y, h, (before[0], x.new_empty(0)) if before else ()


def multi_bwd(dy: Tensor, x: Tensor, bank: Bank, h: Tensor, kept: tuple[Tensor, ...], needs: BankNeeds) -> BankGrads:
    """dx, dA, dB, dm, dc, dbias in float32; None where it is not needed. ``kept`` as multi_fwd returned it, or (y,)."""
    run_it: Any = multi_backward if needs_dispatcher(x) or needs_dispatcher(dy) else _multi_backward
    before = kept[0] if kept else None
    results = iter(run_it(dy, x, h, before, len(kept) == 2, list(bank[:TENSORS]), list(bank.ranks or ()), bank.p, list(needs)))
    return tuple(next(results) if need else None for need in needs)


def _multi(*args: Any) -> tuple[Tensor, ...]:
    return run(*_planned(*args))


def _planned(
    x: Tensor, bank: Sequence[Tensor | None], ranks: Sequence[int], p: float, save_for_dm: bool
) -> tuple[Plan, tuple, tuple]:
    tensors = (x, *bank)
    return plan_for(plan_forward, tensors, tuple(ranks), p, save_for_dm), tensors, ()


def _multi_backward(*args: Any) -> tuple[Tensor, ...]:
    return run(*_planned_backward(*args))


def _planned_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    kept: Tensor | None,
    pre_scale: bool,
    bank: Sequence[Tensor | None],
    ranks: Sequence[int],
    p: float,
    needs: Sequence[bool],
) -> tuple[Plan, tuple, tuple]:
    tensors = (dy, x, h, kept, *bank)
    return plan_for(plan_backward, tensors, pre_scale, tuple(ranks), p, tuple(needs)), tensors, ()


def saves_pre_scale(dtype: torch.dtype, bank: Any) -> bool:
    """Whether y cannot stand in for the value before g; compare linear.py."""
    return bank.bias is not None or dtype == torch.float32


def _read_bank(plan: Builder, likes: Sequence[Like | None]) -> Any:
    W, A, B, m, c, bias, s, offsets, order, seed = likes
    return Bank(
        plan.stack(W),
        plan.matrix(A),
        plan.matrix(B),
        plan.flat(m),
        plan.flat(c),
        plan.flat(bias),
        plan.vector(s),
        plan.vector(offsets),
        plan.vector(order),
        plan.vector(seed),
        None,
    )


def plan_forward(likes: Sequence[Like | None], device: Device, ranks: tuple[int, ...], p: float, save_for_dm: bool) -> Plan:
    plan = Builder("dora_linear_multi forward", device)
    x = plan.tokens(likes[0])
    bank = _read_bank(plan, likes[1:])
    (M, _), (_, R, _), N, t = x.shape, bank.A.shape, bank.B.shape[1], x.dtype
    y, h = plan.result("y", (M, N), t), plan.result("h", (M, R), t)
    pre_scale = plan.result("pre_scale", (M, N), t) if save_for_dm and saves_pre_scale(t, bank) else None
    if M == 0:
        plan.path = "no tokens"
        return plan.plan()
    table = rank_table(plan, ranks or None)
    experts = len(bank.W.shape) == 3
    if t != torch.float32 and is_small(M) and bank.seed is None and not experts:
        plan.path = f"few tokens: one pass over W; up to {LIMIT} tokens reading it is what a call costs"
        multi_small(plan, x, bank._replace(W=in_dtype(plan, bank.W, t)), table, y, h, pre_scale)
        return plan.plan()
    x = sort(plan, x, bank.order)
    out = y if bank.order is None else plan.temp((M, N), t)
    W = turned(bank.W) if experts else operand(plan, in_dtype(plan, bank.W, t)).T
    shape = shape_of(plan, x, out, W, R, bank.A.shape[0], pre_scale is not None, False)
    right = Right(W, bank.B, True)
    beside = bank.seed is None and copies_beside(plan.device, shape)
    if bank.seed is None:
        pad = low_rank_input(plan, x, bank.A, False, bank, table, shape, h, beside)
    laid = lay(plan, right, shape, t, ranks or None, table, beside)
    found = routes(plan, bank, M, table, shape, laid, out, pre_scale)
    if bank.seed is not None:
        pad = low_rank_input(plan, drop(plan, x, bank, found.ids, p), bank.A, False, bank, table, shape, h)
    multi_gemm(plan, x, h, pad, right, laid, bank, found, shape, Wanted(out, pre_scale, bank.bias))
    if bank.order is not None:
        unsort(plan, out, bank.order, y)
    if experts:
        plan.path = "x A_e^T by segments, then one grouped product; g inside, the tiles routed on the device"
    elif t == torch.float32:
        plan.path = "the product by cuBLAS, then the terms of low rank and g in one pass"
    else:
        plan.path = f"x A_a^T by segments, then one fused product; g inside, more than {LIMIT} tokens fill its tiles"
    return plan.plan()


def plan_backward(
    likes: Sequence[Like | None], device: Device, pre_scale: bool, ranks: tuple[int, ...], p: float, needs: tuple[bool, ...]
) -> Plan:
    plan = Builder("dora_linear_multi backward", device)
    dy, x = plan.tokens(likes[0]), plan.tokens(likes[1])
    h, kept = plan.tokens(likes[2]), plan.tokens(likes[3])
    bank = _read_bank(plan, likes[4:])
    need = BankNeeds(*needs)
    (G, _, _), N, f32 = bank.A.shape, bank.B.shape[1], torch.float32
    dx = plan.result("dx", x.shape, x.dtype) if need.x else None
    dA = plan.result("dA", bank.A.shape, bank.A.dtype) if need.A else None
    dB = plan.result("dB", bank.B.shape, bank.B.dtype) if need.B else None
    dm = plan.result("dm", (G, N), bank.m.dtype) if need.m else None
    dc = plan.result("dc", (G, N), f32) if need.c else None
    experts = len(bank.W.shape) == 3
    dbias = plan.result("dbias", (G, N) if experts else (N,), f32) if need.bias else None
    order = bank.order
    out = Out(dx if order is None or dx is None else plan.temp(x.shape, x.dtype), dA, dB, dm, dc, dbias)
    if not experts:
        bank = bank._replace(W=operand(plan, in_dtype(plan, bank.W, x.dtype)))
    x, dy = sort(plan, x, order), sort(plan, dy, order)
    kept = kept if pre_scale else sort(plan, kept, order)
    backward(plan, Given(dy, x, bank, h, kept, pre_scale), ranks or None, p, out)
    if dx is not None and order is not None:
        assert out.dx is not None
        unsort(plan, out.dx, order, dx)
    plan.path = "one pass for dz and the sums over tokens, then one product for dx; sums of each adapter by segments"
    return plan.plan()


# the same as ops that torch sees


def _fake_multi(x, bank, ranks, p, save_for_dm):
    W, A, bias = bank[0], bank[1], bank[5]
    M, N = x.shape[0], W.shape[-2]
    out = [x.new_empty((M, N)), x.new_empty((M, A.shape[1]))]
    return out + [x.new_empty((M, N))] * (save_for_dm and (bias is not None or x.dtype == torch.float32))


def _fake_multi_backward(dy, x, h, kept, pre_scale, bank, ranks, p, needs):
    W, A, B, m = bank[:4]
    full = (x, A, B, m, m, W)
    made = []
    for like, need, name in zip(full, needs, BankNeeds._fields, strict=True):
        if need:
            shape = W.shape[:-1] if name == "bias" else like.shape
            made.append(x.new_empty(shape, dtype=torch.float32 if name in ("c", "bias") else like.dtype))
    return made


multi = op(
    "multi",
    _multi,
    _fake_multi,
    _planned,
    "(Tensor x, Tensor?[] bank, SymInt[] ranks, float p, bool save_for_dm) -> Tensor[]",
)
multi_backward = op(
    "multi_backward",
    _multi_backward,
    _fake_multi_backward,
    _planned_backward,
    "(Tensor dy, Tensor x, Tensor h, Tensor? kept, bool pre_scale, Tensor?[] bank, SymInt[] ranks, float p, bool[] needs) "
    "-> Tensor[]",
)
