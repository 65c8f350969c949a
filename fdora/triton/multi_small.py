"""A handful of tokens of many adapters (decoding: each token its own): bound by reading W once, and what adapters there are.

    parts of h = x A_a^T           one program per segment, slab of the rank and part of K
    h = s_a h, l = h B_a^T         one program per few tokens, or above r = 32 per segment, and few columns
    out = g_a (x W^T + l) + bias   one program per few columns, all of K, then l

Each kernel starts while the one ahead runs, where the GPU has programmatic dependent launch: the last streams W meanwhile.
Sorted inside; ``order`` is looked up where x is read and y written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora.triton.configs import power_of_two, small_config
from fdora.triton.kernels.multi_small import multi_expand_kernel, multi_gather_kernel, multi_shrink_kernel, multi_small_kernel
from fdora.triton.multi_gemm import block_of
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array

BLOCK_T = 16  # tokens of a segment at a time
EXPAND_N = 128
WIDE = 4096  # numbers of a tile
GATHER_R, GATHER_T = 32, 8  # largest rank, and tokens of a program


class RoomConfig(NamedTuple):
    """How the kernels ahead of the one that reads W leave it room on their multiprocessors."""

    SHRINK: int  # programs to one multiprocessor, where parts of K make them so many
    BLOCK_K: int
    STAGES: int
    GATHER: int  # programs to one multiprocessor
    AREA: int  # numbers of B that one of them reads at a time
    WARPS: int  # of the pass over W at least, where its tile is wide: g of each element would spill


def room_config() -> RoomConfig:
    """From h200/multi_forms.json: without room, 1.35 and 1.26 of the time."""
    return RoomConfig(2, 128, 4, 2, 2048, 8)


def multi_small(plan: Builder, x: Array, bank: Any, ranks: Array | None, y: Array, h: Array, pre_scale: Array | None) -> None:
    """(M, K) and a bank -> y, and h and pre_scale in sorted order."""
    (M, K), (G, R, _), N = x.shape, bank.A.shape, y.shape[1]
    if y.numel == 0:
        plan.zero(h)
        return
    room, sms = room_config(), max(1, plan.device.num_sms)
    parts = min(8 if R <= 64 else 4 if R <= 128 else 2, K // 256)
    if R <= GATHER_R:  # no more programs than fit beside the others, were each token another adapter's
        parts = min(parts, room.SHRINK * sms // max(1, min(M, G) * cdiv(R, 16)))
    parts = max(1, parts)
    part, lora = plan.temp((parts, M, R), torch.float32), plan.temp((M, N), torch.float32)
    pdl, rows, block_g = plan.device.supports_pdl, power_of_two(M), block_of(G)
    step = min(room.BLOCK_K, power_of_two(cdiv(K, parts)))
    span = cdiv(cdiv(K, parts), step) * step
    ranked, ordered = ranks is not None, bank.order is not None
    by_a, by_b = bank.A.stride, bank.B.stride
    plan.launch(
        multi_shrink_kernel,
        (M, cdiv(R, 16), parts),
        (x, bank.A, bank.offsets, ranks, bank.order, part, M, G, K, R, span, *x.stride, by_a[0], by_a[2], by_a[1]),
        (ranked, ordered, pdl, BLOCK_T, 16, step, block_g),
        4,
        room.STAGES,
    )
    args = (part, bank.s, bank.B, bank.offsets, ranks, h, lora, M, G, N, R, by_b[0], by_b[2], by_b[1])
    if R <= GATHER_R:
        r = power_of_two(R)
        tile = (GATHER_T, max(16, room.AREA // (GATHER_T * r)), r)
        strips = cdiv(M, GATHER_T)
        grid = (min(cdiv(N, tile[1]), cdiv(room.GATHER * sms, strips)), strips)
        plan.launch(multi_gather_kernel, grid, args, (parts, ranked, pdl, *tile, block_g), 4, 3, pdl)
    else:
        grid = (cdiv(N, EXPAND_N), M)
        tile = (BLOCK_T, EXPAND_N, min(32, power_of_two(R)))
        plan.launch(multi_expand_kernel, grid, args, (parts, ranked, pdl, *tile, block_g), 4, 2, pdl)
    w = bank.W.T
    block_n, block_k, warps, stages = small_config(rows, N, K, w.stride[1] == 1, plan.device.capability, plan.device.num_sms)
    warps = max(warps, room.WARPS) if rows * block_n > WIDE else warps
    flags = (bank.m is not None, bank.bias is not None, pre_scale is not None, ordered)
    plan.launch(
        multi_small_kernel,
        (cdiv(N, block_n),),
        (x, w, lora, bank.m, bank.c, bank.bias, bank.offsets, bank.order, y, pre_scale, M, G, N, K, *x.stride, *w.stride),
        (*flags, pdl, rows, block_n, block_k, block_g),
        warps,
        stages,
        pdl,
    )
