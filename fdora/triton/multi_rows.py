"""Copies for many adapters: tokens into sorted order and back, the dropped x, a bank as one matrix of one dtype; ranks;
and which tokens are whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from fdora.triton.kernels.multi import multi_ranks_kernel
from fdora.triton.kernels.multi_route import multi_count_kernel, multi_route_kernel
from fdora.triton.kernels.multi_rows import bank_kernel, multi_drop_kernel, rows_kernel
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, cdiv, named
from fdora.triton.tiles.configs import power_of_two

TILE = {"BLOCK_M": 8, "BLOCK_N": 512, "BLOCK_K": 512}
BLOCK_Q = 256
ROUTE = 64  # tokens of a block
RANKS = 32  # that one launch writes
NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LookConfig(NamedTuple):
    """How a bank is looked through."""

    AREA: int  # numbers that a program reads at a time
    CHUNKS: int  # programs of an adapter, which share its tiles
    STAGES: int  # tiles under way; 1: they come through registers


def look_config() -> LookConfig:
    return LookConfig(8192, 32, 1)


class Seen(NamedTuple):
    """x A_a^T of tokens sorted by adapter: where it is finite, so is A_a."""

    h: Array
    offsets: Array


def sort(plan: Builder, t: Any, order: Array | None) -> Any:
    """Row by row in sorted order; itself where it is sorted already."""
    if order is None or t is None:
        return t
    out = plan.temp(t.shape, t.dtype)
    _rows(plan, t, order, out, False)
    return out


def unsort(plan: Builder, t: Array, order: Array, out: Array) -> None:
    """From sorted order into ``out``."""
    _rows(plan, t, order, out, True)


def _rows(plan: Builder, x: Array, order: Array, out: Array, scatter: bool) -> None:
    given = {"x": x, "order": order, "gates": None, "out": out, "k": 1, "SCATTER": scatter}
    plan.launch(rows_kernel, "M N", given | named("M N", x.shape), TILE)


def is_apart(bank: Any) -> bool:
    """Whether each adapter has its ratio of dropout, behind the seeds."""
    return bank.seed is not None and bank.seed.numel > bank.A.shape[0]


def drop(plan: Builder, x: Array, bank: Any, found: Any, gain: bool = True) -> Array:
    """The dropped x, tokens counted from the start of their segment, under the seed of its adapter; times 1 / (1 - p)."""
    out, apart = plan.temp(x.shape, x.dtype), gain and is_apart(bank)
    given = {"x": x, "out": out, "scale": 1 / (1 - bank.p) if gain else 1.0, "G": bank.A.shape[0], "APART": apart}
    given["seed"] = bank.seed if apart else None
    plan.launch(multi_drop_kernel, "M K", given | named("M K", x.shape), found, bank, TILE)
    return out


class Laid(NamedTuple):
    """A bank as TMA reads it: (G * height, Q); ``tails``: the last step of each rank that is no multiple of one, apart."""

    matrix: Array
    height: int
    tails: Array | None
    flags: Array | None  # (G, CHUNKS), which of them found what is not finite; None where tiles are not shared


def as_matrix(
    plan: Builder,
    bank: Array,
    dtype: torch.dtype,
    by_row: bool,
    step: int,
    numbers: tuple[int, ...] | None,
    ranks: Array | None,
    experts: bool = False,
    beside: bool = False,
    seen: Seen | None = None,
) -> Laid:
    """(G, P, Q), ranks along P where ``by_row``, else along Q: itself, with a copy of steps that would meet what lies beyond a
    rank or the next adapter, and meet zeros (0 times a NaN is one); or a copy of all. ``beside``: the kernel ahead. ``seen``:
    x times this bank."""
    G, P, Q = bank.shape
    by_bank, by_p, by_q = bank.stride
    height = cdiv(P, step) * step if by_row else P
    pitched = by_q == 1 and by_p >= Q and by_p * bank.itemsize % 16 == 0 and (by_bank == P * by_p or G == 1)
    whole = numbers is None or all(r % step == 0 for r in numbers)
    fits = bank.dtype == dtype and bank.aligned and pitched
    apart = fits and not experts and (height != P or not whole)
    copy = not fits or (experts and (height != P or not whole))
    pitch = cdiv(Q, 16 // dtype.itemsize) * (16 // dtype.itemsize)
    if apart:
        height = P
    out = plan.temp((G * height, Q), dtype, (pitch, 1)) if copy else replace(bank, shape=(G * P, Q), stride=(by_p, 1))
    if experts and not copy:
        return Laid(out, height, None, None)
    tails = plan.temp((G * step, Q) if by_row else (G * P, step), dtype, (pitch if by_row else step, 1)) if apart else None
    look = look_config()
    flags = plan.temp((G, look.CHUNKS), torch.int32)
    h, offsets = (None, None) if seen is None or copy else seen
    M, R = (0, 0) if h is None else h.shape
    # A tile as wide as a step: as wide as a row it had a quarter of its loads under way where a rank is small.
    block_q = min(BLOCK_Q if by_row or numbers is None else step, power_of_two(Q))
    given: dict[str, Any] = {
        "x": bank,
        "ranks": ranks,
        "out": out if copy else tails,
        "flags": flags,
        "h": h,
        "offsets": offsets,
    }
    given |= {"P": P, "Q": Q, "M": M, "G": G, "R": R, "height": height, "pitch": pitch if tails is None else tails.stride[0]}
    given |= {"dtype": NAMES[dtype], "COPY": copy, "APART": apart, "BY_ROW": by_row, "STEP": step}
    given |= {"BLOCK_P": look.AREA // block_q, "BLOCK_Q": block_q, "BLOCK_H": power_of_two(max(1, R))}
    plan.launch(bank_kernel, (G, look.CHUNKS), given, look, pdl=beside)
    return Laid(out, height, tails, None if experts else flags)


def rank_table(plan: Builder, ranks: tuple[int, ...] | None) -> Array | None:
    """True ranks on the device: they are numbers of the plan."""
    if ranks is None:
        return None
    out = plan.temp((len(ranks),), torch.int32)
    for at in range(0, len(ranks), RANKS):
        some = [*ranks[at : at + RANKS], *[0] * RANKS][:RANKS]
        # The highest bit says nothing: with it all of them are 64 bits wide, and one kernel serves.
        words = [sum(r << 15 * j for j, r in enumerate(some[i : i + 4])) | 1 << 62 for i in range(0, RANKS, 4)]
        given = {"ranks": out, "G": len(ranks), "first": at, **named("w0 w1 w2 w3 w4 w5 w6 w7", words)}
        plan.launch(multi_ranks_kernel, (1,), given, num_warps=1)
    return out


@planned(
    "multi_route(Tensor ids, SymInt adapters) -> Tensor[]",
    "tokens sorted by adapter",
    "vector",
    lambda ids, G: {"offsets": ((G,), torch.int32), "order": (ids.shape, torch.int64), "place": (ids.shape, torch.int64)},
    "the place of a token is counted",
)
def plan_route(plan: Builder, ids: Array, G: int) -> None:
    """Which tokens are whose, from the adapter of each: offsets (G,), the order (M,) and its
    inverse, where tokens of no adapter come last. Two launches that count, where torch sorts in several.

    The place of a token is how many come before it: those of earlier adapters, and earlier ones of its own. Each block of
    tokens reads what all blocks have counted, so for some thousand tokens at most.
    """
    (M,), (offsets, order, place) = ids.shape, plan.wanted()
    blocks, block_g = max(1, cdiv(M, ROUTE)), power_of_two(min(64, G + 1))
    counts = plan.temp((blocks, G + 1), torch.int32)
    given = {"ids": ids, "counts": counts, "M": M, "G": G, "BLOCK_T": ROUTE, "BLOCK_G": block_g}
    plan.launch(multi_count_kernel, (blocks, cdiv(G + 1, block_g)), given)
    given |= {"offsets": offsets, "order": order, "place": place, "blocks": blocks, "BLOCK_B": ROUTE}
    plan.launch(multi_route_kernel, (blocks,), given)


route = plan_route.call
