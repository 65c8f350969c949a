"""PEFT's dropout where tokens belong to many adapters: dropped.py with the g, the ratio and the mask of each token's adapter.

    v = D(x) W^T + h B_a^T                     y = x W^T + h B_a^T + (g_a - 1) v + bias
    dx = dy W + D'(dz W - dy W + dh A_a)       h = s_a D(x) A_a^T,  dh = s_a dz B_a,  dz = g_a dy

Products with W ask for no adapter. Where one of codes pays, all adapters share that of what is dropped, L and (dy - z):

    D(x) W^T = (x W^T - L W^T) / (1 - p_a)     dx = z W + D'(dh A_a) + (dropped of (dy - z) W)

x W^T and z W come from cuBLAS in float32, since y is rounded once. What differs by token is in the pass behind both products:
the term of low rank, g, p and the mask. So it takes any number of adapters of any rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fdora.triton.copy import in_dtype, operand
from fdora.triton.dropped import codes_of_dropped, product_of_change, tile_of_dropped
from fdora.triton.fp8 import Other
from fdora.triton.gemm import gemm
from fdora.triton.multi_gemm import Right, Routes, Shape, Wanted, behind, low_rank_input, multi_gemm, routes
from fdora.triton.multi_rows import drop, sort, unsort
from fdora.triton.runtime import Array, Builder
from fdora.triton.tiles.configs import GemmConfig

TWO, CODES = "two products by cuBLAS", "a product by cuBLAS, and one of e4m3 codes for what is dropped"


def tile_of_bank(plan: Builder, left: Array, W: Array, columns: int, bank: Any) -> GemmConfig | None:
    """As tile_of_dropped; one for all ranks, of which these products have none."""
    return tile_of_dropped(plan, left, W, columns, 1, bank.p, left.dtype)


def kind_of(tile: GemmConfig | None) -> str:
    """Of the second product, as multi_epilogue_kernel names it."""
    return "product" if tile is None else "codes"


def dropped_forward(plan: Builder, x: Array, bank: Any, ranks: tuple[int, ...], out: tuple[Array, Array, Array | None]) -> str:
    """y, in the order of x; h and v, sorted. Returns what it does, in words."""
    (y, h, pre_scale), t, order = out, x.dtype, bank.order
    W, to = operand(plan, in_dtype(plan, bank.W, t)), y if order is None else plan.temp(y.shape, t)
    x, bank, shape = sort(plan, x, order), bank._replace(order=None), behind(h.shape[1])
    found = routes(plan, bank, x.shape[0], shape)
    xd, other = drop(plan, x, bank, found), plan.temp(y.shape, t)
    low_rank_input(plan, xd, bank.A, False, bank, shape, h, ranks)
    tile = tile_of_bank(plan, x, W, W.shape[0], bank)
    if tile is None:
        plan.product(other, xd, W.T)
    else:
        x8, right, scales = codes_of_dropped(plan, x, Other("dropped", xd), W)
        gemm(plan, other, x8, None, right, config=tile, scales=scales)
    wanted = Wanted(to, pre_scale, bank.bias, other, kind_of(tile))
    multi_gemm(plan, x, h, None, Right(W.T, bank.B, True), None, bank, found, shape, wanted)
    if order is not None:
        unsort(plan, to, order, y)
    return f"{TWO if tile is None else CODES}; the terms of low rank and g in one pass behind both"


class Change(NamedTuple):
    """What backward multiplies by W where D(x) is: (g - 1) / (1 - p) dy, or, beside a product of codes, z."""

    z: Array
    tile: GemmConfig | None


def change_of(plan: Builder, dy: Array, bank: Any) -> Change:
    z = plan.temp(dy.shape, dy.dtype)
    return Change(z, tile_of_bank(plan, z, bank.W, bank.W.shape[1], bank))


def dropped_dx(
    plan: Builder, dx: Array, dy: Array, change: Change, dh: Array, right: Right, bank: Any, found: Routes, shape: Shape
) -> None:
    z, tile = change
    other = plan.temp(dx.shape, dx.dtype)
    if tile is None:
        plan.product(other, z, bank.W)
    else:
        product_of_change(plan, other, z, dy, bank.W, tile)
    wanted, first = Wanted(dx, None, None, other, kind_of(tile)), dy if tile is None else z
    multi_gemm(plan, first, dh, None, right, None, bank, found, shape, wanted)
