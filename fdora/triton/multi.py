"""Many adapters on one W, each for its own tokens, as one plan for each direction; formulas: fdora/eager/multi.py.

Half precision, forward, by how many tokens and ranks there are:

    up to 64 tokens         one pass over W (multi_small.py)
    few ranks in all        one layer with the ranks of all adapters (multi_table.py)
    up to 1024 tokens       x W^T by cuBLAS, then the rest in one pass over rows that are looked up in sorted order
    sorted tokens           h = s_a x A_a^T by segments, then one product with all else inside (multi_gemm.py)
    PEFT's dropout          two products, the second of codes where that pays, then the rest in one pass (multi_dropped.py)
    tokens in any order     as up to 1024

The first two ask for no order. float32 is as up to 1024 tokens too. Dropout's masks are drawn where x is read. Backward
(multi_bwd.py) copies tokens into sorted order, and dx back.

W of three axes, and a bias of two: each adapter is an expert with a W of its own. The same plans with another grouping of the
rows into tiles (multi_gemm.py); float32 then is a Triton product too, since cuBLAS would want lengths.

Nothing asks for a length: grids depend on M, G and shapes alone. What is not finite in an adapter makes its own tokens NaN (all
of them by TMA) and nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdora._records import Bank, BankNeeds
from fdora.quant import QuantWeight
from fdora.triton.codes import Packed, coded_of, packed, tensors_of, weights_of, written
from fdora.triton.copy import dense, in_dtype, operand
from fdora.triton.dropout import wants_copy
from fdora.triton.fp8 import grouped_forward, grouped_tile, tile_of_codes, way_of, x_of, y_of_codes
from fdora.triton.multi_bwd import Given, Out, backward, gated_scale, stack_in, words_of
from fdora.triton.multi_dropped import dropped_forward
from fdora.triton.multi_gemm import (
    Right,
    Wanted,
    behind,
    copies_beside,
    grouped,
    lay,
    low_rank_input,
    multi_gemm,
    routes,
    shape_of,
    turned,
)
from fdora.triton.multi_norm import bank_norm as bank_norm
from fdora.triton.multi_rows import drop, rank_table, sort, unsort
from fdora.triton.multi_rows import route as route
from fdora.triton.multi_small import multi_small
from fdora.triton.multi_table import multi_table, takes_table
from fdora.triton.op import Likes, planned
from fdora.triton.runtime.builder import Builder, asked
from fdora.triton.runtime.plan import Array
from fdora.triton.small import LIMIT, is_small
from fdora.triton.tiles.configs import GemmConfig

TENSORS = 11  # of a bank; behind them ranks, p and mode
READS = "stack matrix matrix flat flat flat vector vector vector vector vector"  # how a plan takes them
BankGrads = tuple[Tensor | None, ...]


def multi_fwd(x: Tensor, bank: Bank, save_for_dm: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """x (M, K) -> y (M, N), h = s_a x A_a^T (M, r) in sorted order, and what dm reads beside h: nothing where y will do."""
    tensors, *coded = listed(bank)
    y, h, *before = plan_forward.call(x, tensors, list(bank.ranks or ()), bank.p, bank.mode, save_for_dm, *coded)
    return y, h, (before[0], x.new_empty(0)) if before else ()


def multi_bwd(
    dy: Tensor,
    x: Tensor,
    bank: Bank,
    h: Tensor,
    kept: tuple[Tensor, ...],
    needs: BankNeeds,
    scaled: bool = False,
    other: Tensor | None = None,
) -> BankGrads:
    """dx, dA, dB, dm, dc, dbias in float32; None where it is not needed. ``kept`` as multi_fwd returned it, or (y,).
    ``scaled``: dy is dz, and dx, dA and dB are all that is wanted. ``other`` is added to dx, beside no dropout of PEFT's."""
    before = kept[0] if kept else None
    (tensors, *coded), pre_scale = listed(bank), len(kept) == 2
    (ranks, how) = list(bank.ranks or ()), (bank.p, bank.mode)
    results = iter(plan_backward.call(dy, x, h, before, other, pre_scale, scaled, tensors, ranks, *how, list(needs), *coded))
    return tuple(next(results) if need else None for need in needs)


def multi_gated_bwd(
    da: Tensor,
    gate: Tensor,
    up: Tensor,
    x: Tensor,
    h: Sequence[Tensor],
    banks: Sequence[Bank],
    act: str,
    needs: Sequence[BankNeeds],
) -> Iterator[Tensor]:
    """dz of both layers; then dm and dc of each, where it is needed. Neither has a bias, and dropout is not PEFT's."""
    tensors, wanted = [[*bank[:TENSORS]] for bank in banks], [need for each in needs for need in (each.m, each.c)]
    return iter(plan_gated.call(da, gate, up, x, list(h), *tensors, act, wanted))


def listed(bank: Bank) -> tuple[list[Tensor | None], list[str], list[int], bool]:
    """The tensors; those of a W of codes behind the others, the facts of it, and whether it is of experts."""
    tensors: list[Any] = list(bank[:TENSORS])
    if not isinstance(bank.W, QuantWeight):
        return tensors, [], [], False
    return [None, *tensors[1:], *tensors_of(bank.W.tensors)], *written([coded_of(bank.W)]), bank.experts


def any_order(M: int, dtype: torch.dtype, A: Any, p: float) -> bool:
    """Whether multi_fwd takes M tokens with their ids: h, and what dm reads beside it, are in the order of x then."""
    return dtype.itemsize == 2 and p == 0 and (is_small(M) or takes_table(M, A.shape[0] * A.shape[1], False))


def saves_pre_scale(dtype: torch.dtype, bank: Any) -> bool:
    """Whether y cannot stand in for the value before g; compare linear.py."""
    return bank.bias is not None or dtype == torch.float32 or bank.mode == "peft"


def _read_bank(
    plan: Builder,
    likes: Likes,
    p: float,
    mode: str,
    text: Sequence[str] = (),
    numbers: Sequence[int] = (),
    experts: bool = False,
) -> Any:
    read = [getattr(plan, how)(like) for how, like in zip(READS.split(), likes[:TENSORS], strict=True)]
    for W in weights_of(text, numbers):
        read[0] = packed(plan, likes[TENSORS:], W)
    return Bank._make((*read, None, p, experts, mode))


@planned(
    "multi(Tensor x, Tensor?[] bank, SymInt[] ranks, float p, str mode, bool save_for_dm, str[] text, SymInt[] numbers, "
    "bool experts) -> Tensor[]",
    "dora_linear_multi forward",
    "tokens rest",
    lambda x, likes, ranks, p, mode, save_for_dm, *_: _outputs(x, _described(likes, mode=mode), save_for_dm),
    has_families=True,
)
def plan_forward(
    plan: Builder,
    x: Array,
    likes: Likes,
    ranks: tuple[int, ...],
    p: float,
    mode: str,
    save_for_dm: bool,
    *coded: Any,
) -> None:
    """likes: those of the bank. A W of codes, of which ``coded`` tells, is multiplied by codes of x (fp8.py)."""
    bank = _read_bank(plan, likes, p, mode, *coded)
    (M, _), (G, R, _), t = x.shape, bank.A.shape, x.dtype
    y, h, pre_scale = plan.wanted()
    if M == 0:
        plan.path = "no tokens"
        return
    bank, experts, codes = bank._replace(ranks=rank_table(plan, ranks or None)), is_experts(bank), None
    if isinstance(bank.W, Packed):
        of = bank.W, R, y, pre_scale
        codes = grouped_tile(plan, G, *of) if experts else tile_of_codes(plan, x, *of)
        bank = bank if codes else bank._replace(W=stack_in(plan, bank, t))
    as_they_come = t != torch.float32 and bank.seed is None and bank.order is None and not experts
    if as_they_come and is_small(M):
        plan.path = f"few tokens: one pass over W; up to {LIMIT} tokens reading it is what a call costs"
        return multi_small(plan, x, bank._replace(W=in_dtype(plan, bank.W, t)), y, h, pre_scale)
    if as_they_come and (bank.ids is not None or takes_table(M, G * R, not codes)):
        bank = bank if codes else bank._replace(W=in_dtype(plan, bank.W, t))
        how = multi_table(plan, x, bank, y, h, pre_scale, codes)
        plan.path = f"x A^T of all adapters, then the product; {how}; few ranks in all"
        return None
    if mode == "peft":
        plan.path = dropped_forward(plan, x, bank, ranks, (y, h, pre_scale))
        return
    plan.path = _by_segments(plan, x, bank, codes, (y, h, pre_scale), ranks)


def _by_segments(plan: Builder, x: Array, bank: Any, codes: GemmConfig | None, out: Any, ranks: tuple[int, ...]) -> str:
    """What comes of sorted tokens. Returns what it does, in words."""
    (y, h, pre_scale), (M, _), (G, R, _), t, experts = out, x.shape, bank.A.shape, x.dtype, is_experts(bank)
    product: Any = None
    if codes and experts:
        product = grouped_forward(plan, x, bank.W, G)
        W, shape = product.w.T, grouped(codes, G)
    elif codes:
        W, shape = bank.W, behind(R)
        product = partial(_base, plan, x, bank.W, codes)
    else:
        W = turned(bank.W) if experts else operand(plan, in_dtype(plan, bank.W, t)).T
        shape = shape_of(plan, x, y, W, R, G, pre_scale is not None, bank.order is not None)
    right, beside = Right(W, bank.B, True), copies_beside(plan.device, shape)
    left, drawn = x, bank  # of h
    if bank.seed is not None and wants_copy(R):
        left, drawn = drop(plan, x, bank, routes(plan, bank, M, behind(R))), bank._replace(order=None, seed=None)
    pad = low_rank_input(plan, left, bank.A, False, drawn, shape, h, ranks, beside, "mask" if drawn.seed is not None else "")
    laid = lay(plan, right, shape, t, ranks or None, bank.ranks, beside)
    found = routes(plan, bank._replace(seed=None), M, shape, laid, y, pre_scale)
    multi_gemm(plan, x, h, pad, right, laid, bank, found, shape, Wanted(y, pre_scale, bank.bias), product)
    if codes and experts:
        return "x A_e^T by segments, x as e4m3 codes, then one grouped product of codes; low-rank term and g inside"
    if codes:
        return (
            f"{way_of(bank.W).partition(',')[0]}, then one product of codes; the terms of low rank and g in one pass behind it"
        )
    if experts:
        return "x A_e^T by segments, then one grouped product; g inside, the tiles routed on the device"
    if shape.config is None:
        return "the product by cuBLAS, then the terms of low rank and g in one pass"
    return f"x A_a^T by segments, then one fused product; g inside, more than {LIMIT} tokens fill its tiles"


def _base(plan: Builder, x: Array, W: Any, config: GemmConfig, out: Array) -> None:
    """x W^T of codes."""
    y_of_codes(plan, out, x_of(plan, x, W), W, config)


@planned(
    "multi_backward(Tensor dy, Tensor x, Tensor h, Tensor? kept, Tensor? other, bool pre_scale, bool scaled, Tensor?[] bank, "
    "SymInt[] ranks, float p, str mode, bool[] needs, str[] text, SymInt[] numbers, bool experts) -> Tensor[]",
    "dora_linear_multi backward",
    "tokens tokens tokens tokens rest",
    lambda dy, x, h, kept, likes, pre_scale, scaled, ranks, p, mode, needs, text=(), numbers=(), experts=False: _gradients(
        x, _described(likes[1:], experts), needs
    ),
    words_of("one product"),
    has_families=True,
    asks=(1, 0),
)
def plan_backward(
    plan: Builder,
    dy: Array,
    x: Array,
    h: Array,
    kept: Array | None,
    likes: Likes,
    pre_scale: bool,
    scaled: bool,
    ranks: tuple[int, ...],
    p: float,
    mode: str,
    needs: tuple[bool, ...],
    *coded: Any,
) -> None:
    """likes: that of the dx that is added, and those of the bank."""
    other, bank = plan.tokens(likes[0]), _read_bank(plan, likes[1:], p, mode, *coded)
    assert other is None or not (is_experts(bank) or mode == "peft"), "no kernel adds it there"
    dx, *grads = plan.wanted()
    order = bank.order
    sorted_dx = dx if order is None or dx is None else plan.temp(x.shape, x.dtype)
    if not is_experts(bank) and not isinstance(bank.W, Packed):
        bank = bank._replace(W=operand(plan, in_dtype(plan, bank.W, x.dtype)))
    x, dy = sort(plan, x, order), sort(plan, dy, order)
    other = other and dense(plan, sort(plan, other, order))
    kept = kept if pre_scale else sort(plan, kept, order)
    bank = bank._replace(order=None)
    backward(plan, Given(dy, x, bank, h, kept, pre_scale, scaled, other), ranks or None, Out(sorted_dx, *grads))
    if dx is not None and order is not None:
        unsort(plan, sorted_dx, order, dx)


@planned(
    "multi_gated(Tensor da, Tensor gate, Tensor up, Tensor x, Tensor[] h, Tensor?[] first, Tensor?[] second, str act, "
    "bool[] needs) -> Tensor[]",
    "gated multi backward",
    "tokens tokens tokens tokens rest",
    lambda da, gate, up, x, likes, act, needs: _gated_forms(gate, likes[2:], needs),
    "one pass for dz and the sums of both",
    has_families=True,
)
def plan_gated(
    plan: Builder, da: Array, gate: Array, up: Array, x: Array, likes: Likes, act: str, needs: tuple[bool, ...]
) -> None:
    """likes: h of both, and their banks."""
    hs, halves = [plan.tokens(like) for like in likes[:2]], (likes[2 : 2 + TENSORS], likes[2 + TENSORS :])
    banks = [_read_bank(plan, half, 0.0, "lora") for half in halves]
    *dzs, dm, dc, dm_up, dc_up = plan.wanted()
    if gate.shape[0] == 0:
        for each in (dm, dc, dm_up, dc_up):
            if each is not None:
                plan.zero(each)
        return
    da, gate, up = (dense(plan, each) for each in (da, gate, up))
    pair = [Given(da, x, bank, h, v, False) for bank, h, v in zip(banks, hs, (gate, up), strict=True)]
    outs = [Out(None, None, None, *each, None) for each in ((dm, dc), (dm_up, dc_up))]
    gated_scale(plan, pair, act, dzs, outs)


def _gated_forms(gate: Any, banks: Likes, needs: Sequence[bool]) -> dict[str, Any]:
    forms: dict[str, Any] = dict.fromkeys(("dz_gate", "dz_up"), (gate.shape, gate.dtype))
    for name, likes in ("gate", banks[:TENSORS]), ("up", banks[TENSORS:]):
        bank: Any = _described(likes)
        m = (bank.A.shape[0], gate.shape[1])
        forms |= {f"dm_{name}": (m, bank.m.dtype), f"dc_{name}": (m, torch.float32)}
    return asked(forms, (True, True, *needs))


def _described(tensors: Sequence[Any], experts: bool = False, mode: str = "lora") -> Bank:
    """A bank of which forms are asked."""
    return Bank._make((*tensors[:TENSORS], None, 0.0, experts, mode))


def is_experts(bank: Bank) -> bool:
    return bank.experts or (bank.W is not None and len(bank.W.shape) == 3)


def _outputs(x: Any, bank: Bank, save_for_dm: bool) -> dict[str, Any]:
    """y, h and what dm reads beside it."""
    (M, N), t = (x.shape[0], bank.B.shape[1]), x.dtype
    saved = save_for_dm and saves_pre_scale(t, bank)
    return {"y": ((M, N), t), "h": ((M, bank.A.shape[1]), t), "pre_scale": ((M, N), t) if saved else None}


def _gradients(x: Any, bank: Bank, needs: Sequence[bool]) -> dict[str, Any]:
    """The form of each gradient that is asked for."""
    A, B, m, f32 = bank.A, bank.B, (bank.A.shape[0], bank.B.shape[1]), torch.float32
    of_m, of_bias = None if bank.m is None else (m, bank.m.dtype), (m if is_experts(bank) else m[1:], f32)
    forms = ((x.shape, x.dtype), (A.shape, A.dtype), (B.shape, B.dtype), of_m, (m, f32), of_bias)
    return asked({f"d{name}": form for name, form in zip(BankNeeds._fields, forms, strict=True)}, needs)
