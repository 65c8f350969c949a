"""A handful of tokens of many adapters (decoding: each token its own): bound by reading W once, and what adapters there are.

    h = s_a x A_a^T, l = h B_a^T   one program per token and some columns; above r = 32 in two kernels:
      parts of h = x A_a^T         one program per adapter, slab of the rank and part of K
      h = s_a h, l = h B_a^T       one program per adapter and few columns
    out = g_a (x W^T + l) + bias   one program per few columns, all of K, then l

Each kernel starts while the one ahead runs, where the GPU has programmatic dependent launch: the last streams W meanwhile.
Nothing is sorted: the program of an adapter's first token finds the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fdora.triton.kernels.multi_small import multi_expand_kernel, multi_low_kernel, multi_shrink_kernel, multi_small_kernel
from fdora.triton.multi_gemm import block_of
from fdora.triton.runtime import Array, Builder, cdiv, named
from fdora.triton.small import parts_of
from fdora.triton.tiles.configs import power_of_two, small_config

EXPAND_N = 128  # columns where the pass over W does not run beside
WIDE = 4096  # numbers of a tile
LOW_R = 32  # largest rank whose terms one launch forms


class RoomConfig(NamedTuple):
    """How the kernel ahead of the one that reads W leaves it room on their multiprocessors."""

    PROGRAMS: int  # to one multiprocessor, at most
    AREA: int  # numbers of A or B that one of them reads at a time
    STAGES: int
    LOW_WARPS: int
    WARPS: int  # of the pass over W at least, where its tile is wide: g of each element would spill


def room_config() -> RoomConfig:
    """From h200/multi_forms.json: reads in one stage take 1.4 and 1.2 of the time, since nothing else is under way."""
    return RoomConfig(1, 16384, 3, 8, 8)


class Low(NamedTuple):
    """What the pass over W finds there: h is for backward."""

    h: Array
    lora: Array
    g: Array | None  # (M, N)


def multi_small(plan: Builder, x: Array, bank: Any, y: Array, h: Array, pre_scale: Array | None) -> None:
    """(M, K) and a bank -> y, h and pre_scale, in the order of x."""
    (M, K), R, N = x.shape, bank.A.shape[1], y.shape[1]
    if y.numel == 0:
        plan.zero(h)
        return
    room = room_config()
    low = Low(h, plan.temp((M, N)), None if bank.m is None else plan.temp((M, N)))
    rows = power_of_two(M)
    (_low if R <= LOW_R else _by_adapters)(plan, x, bank, low, room)
    w = bank.W.T
    config = small_config(rows, N, K, w.stride[1] == 1, plan.device.capability, plan.device.num_sms)
    if rows * config.BLOCK_N > WIDE:
        config = config._replace(num_warps=max(config.num_warps, room.WARPS))
    given = {"x": x, "w": w, "out": y, "pre_scale": pre_scale, "M": M, "N": N, "K": K, "BLOCK_M": rows}
    plan.launch(multi_small_kernel, "N", given, low, bank, config, pdl=plan.pdl)


def _low(plan: Builder, x: Array, bank: Any, low: Low, room: RoomConfig) -> None:
    """One launch. Each program forms all of h of its token: no more of them than have room."""
    (M, K), (G, R, _), N = x.shape, bank.A.shape, low.lora.shape[1]
    r, area = power_of_two(R), room.AREA
    if not 90 <= plan.device.capability < 120 and max(bank.A.itemsize, bank.B.itemsize) > x.itemsize:
        area //= 2  # an sm_86 and an sm_120 have no room for as much float32
    block_k, block_n = (min(max(16, area // r), power_of_two(size)) for size in (K, N))
    columns = min(cdiv(N, block_n), max(1, room.PROGRAMS * max(1, plan.device.num_sms) // M))
    given = {"x": x, "f": bank.A, "b": bank.B, "M": M, "G": G, "K": K, "N": N, "R": R, **strides_of(bank)}
    given |= {"BLOCK_R": r, "BLOCK_K": block_k, "BLOCK_N": block_n, "BLOCK_G": block_of(G), "PDL": plan.pdl}
    plan.launch(multi_low_kernel, (columns, M), given, low, bank, room, num_warps=room.LOW_WARPS, num_stages=room.STAGES)


def strides_of(bank: Any) -> dict[str, int]:
    """Of A and B, their axes in the order in which products have them."""
    return named("stride_fr stride_fk stride_bn stride_br", (*bank.A.stride[1:], *bank.B.stride[1:]))


def _by_adapters(plan: Builder, x: Array, bank: Any, low: Low, room: RoomConfig) -> None:
    """Products of an adapter with all of its tokens: parts of x A_a^T, then their sum and h B_a^T."""
    (M, K), (G, R, _), N = x.shape, bank.A.shape, low.lora.shape[1]
    parts = parts_of(K, R)
    part, by, pdl = plan.temp((parts, M, R)), strides_of(bank), plan.pdl
    step = min(128, power_of_two(cdiv(K, parts)))
    span = cdiv(cdiv(K, parts), step) * step
    of = {"part": part, "M": M, "G": G, "R": R, "PDL": pdl, "BLOCK_T": power_of_two(M), "BLOCK_G": block_of(G)}
    given = {"x": x, "f": bank.A, "K": K, "span": span, "stride_fk": by["stride_fk"], "stride_fr": by["stride_fr"]}
    tile = {"BLOCK_R": 16, "BLOCK_K": step}
    plan.launch(multi_shrink_kernel, (M, cdiv(R, 16), parts), {**of, **given, **tile}, bank, num_stages=4)
    given = {"b": bank.B, "N": N, "PARTS": parts, "stride_br": by["stride_br"], "stride_bn": by["stride_bn"]}
    block_n = 8192 // power_of_two(M) if pdl else EXPAND_N  # few programs: the pass over W begins when all of them have
    tile = {"BLOCK_N": block_n, "BLOCK_R": min(32, power_of_two(R))}
    plan.launch(multi_expand_kernel, (cdiv(N, block_n), M), {**of, **given, **tile}, low, bank, num_stages=2, pdl=pdl)
