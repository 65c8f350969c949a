"""The product of a layer whose tokens belong to many adapters: x W^T does not ask whose a token is, what follows does.

    out = g_a (x W + h B_a) + bias        a: the adapter of the row

A tile of rows knows the segments that meet it (:class:`Routes`, written on the device). h lies twice: (M, R), and by pairs of
a tile and a segment with zeros in the rows of others, so that the steps of low rank of a tile are whole products, in the same
loop as those of x W (see gemm.py). g of a tile of one adapter is a vector; elsewhere each row fetches its own. Zeros times what
is not finite are NaN: an adapter that holds such numbers is left out of tiles that others share, and gets a g of NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fdora.triton.choice import fused_config
from fdora.triton.configs import GemmConfig, power_of_two
from fdora.triton.dropout import threshold
from fdora.triton.kernels.multi import multi_h_kernel, multi_ranks_kernel, multi_routes_kernel
from fdora.triton.kernels.multi_gemm import multi_epilogue_kernel, multi_gemm_pointer_kernel, multi_gemm_tma_kernel
from fdora.triton.multi_rows import Laid, as_matrix
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import INTERPRETED, cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Tile

BLOCK_GN = 1024  # columns of g that a program writes
EPILOGUE_M, EPILOGUE_N = 64, 64
RANKS = 32  # that one launch writes


def block_of(G: int) -> int:
    """How many offsets are looked at at once."""
    return power_of_two(min(G, 64))


class Shape(NamedTuple):
    """How the product runs: its tile, by TMA or by pointers; or by cuBLAS with one pass behind it."""

    config: GemmConfig | None
    BLOCK_M: int
    BLOCK_R: int  # a step of low rank


def shape_of(plan: Builder, x: Array, out: Array, w: Array, R: int, extra: bool, masked: bool) -> Shape:
    """w (K, N). ``extra``: one more tile leaves at the end. ``masked``: dropout, whose mask is not of the base product."""
    (M, K), N = x.shape, out.shape[1]
    if x.dtype == torch.float32 or masked:
        return Shape(None, EPILOGUE_M, min(64, power_of_two(R)))
    trans = w.stride[0] == 1 and w.stride[1] != 1
    tma, on = all(map(is_tma_compatible, (x, out, w.T if trans else w))), plan.device
    config = fused_config(M, N, K, R, trans, extra, tma, on.capability, on.num_sms)
    return Shape(config, config.BLOCK_M, config.BLOCK_K if config.tma else min(config.BLOCK_K, power_of_two(R)))


class Routes(NamedTuple):
    """Whose tokens are where, for tiles of BLOCK_M rows."""

    ids: Array  # (M,) segment of each token
    route: Array  # (tiles, 4) first and last segment, steps of low rank and where they begin
    steps: Array  # adapter * 32768 + slab
    g: Array | None  # (G + 1, N), 1 behind the last adapter
    ranks: Array | None  # (G,)


def rank_table(plan: Builder, ranks: tuple[int, ...] | None) -> Array | None:
    """True ranks on the device: they are numbers of the plan."""
    if ranks is None:
        return None
    out = plan.temp((len(ranks),), torch.int32)
    for at in range(0, len(ranks), RANKS):
        some = [*ranks[at : at + RANKS], *[0] * RANKS][:RANKS]
        # The highest bit says nothing: with it all of them are 64 bits wide, and one kernel serves.
        words = [sum(r << 15 * j for j, r in enumerate(some[i : i + 4])) | 1 << 62 for i in range(0, RANKS, 4)]
        plan.launch(multi_ranks_kernel, (1,), (out, len(ranks), at, *words), (), 1)
    return out


def routes(plan: Builder, bank: Any, M: int, ranks: Array | None, shape: Shape, flags: Array | None = None) -> Routes:
    """``flags``: which adapters hold what is not finite; they get a g that is a NaN."""
    (G, R, _), N = bank.A.shape, bank.B.shape[1]
    tiles, span = cdiv(M, shape.BLOCK_M), cdiv(R, shape.BLOCK_R)
    ids, route = plan.temp((M,), torch.int32), plan.temp((tiles, 4), torch.int32)
    steps = plan.temp(((tiles + G) * span,), torch.int32)
    with_g = bank.m is not None or flags is not None
    g = plan.temp((G + 1, N), torch.float32) if with_g else None
    blocks = (G + 1) * cdiv(N, BLOCK_GN) if with_g else 0
    plan.launch(
        multi_routes_kernel, (tiles + blocks,),
        (bank.offsets, ranks, flags, bank.m, bank.c, ids, route, steps, g, M, G, N, R, span, tiles),
        (ranks is not None, bank.m is not None, with_g, 0 if flags is None else flags.shape[1], shape.BLOCK_M, shape.BLOCK_R,
         block_of(G), BLOCK_GN), 4,
    )  # fmt: skip
    return Routes(ids, route, steps, g, ranks)


def low_rank_input(
    plan: Builder, x: Array, f: Array, trans: bool, bank: Any, ranks: Array | None, shape: Shape, h: Array
) -> Array | None:
    """h = s_a x f_a^T; f (G, R, K), or (G, K, R) where ``trans``. Returns it by pairs, where the product wants that."""
    (M, K), R, G = x.shape, h.shape[1], f.shape[0]
    by_bank, by_r, by_k = f.stride if not trans else (f.stride[0], f.stride[2], f.stride[1])
    padded = shape.config is not None and shape.config.tma
    tile, half = shape.BLOCK_M, x.dtype != torch.float32
    pairs = cdiv(M, tile) + G
    width = cdiv(R, 8) * 8
    pad = plan.temp((pairs * tile, R), x.dtype, (width, 1)) if padded else None
    block_m = min(tile, 32 if R <= 32 else 64)
    block_r = min(64, power_of_two(R))
    block_k = (128 if block_r <= 64 else 64) if half else 32
    plan.launch(
        multi_h_kernel, (cdiv(R, block_r), pairs * (tile // block_m)),
        (x, f, bank.s, bank.offsets, ranks, h, pad, M, G, K, R, *x.stride, by_bank, by_k, by_r, h.stride[0], width),
        (ranks is not None, padded, "ieee", tile, block_m, block_r, block_k, block_of(G)), 4, 4 if half else 2,
    )  # fmt: skip
    return pad


class Right(NamedTuple):
    """w (K, N), and the bank b of (R, N) matrices: (G, R, N), or (G, N, R) where ``trans``."""

    w: Array
    b: Array
    trans: bool


class Wanted(NamedTuple):
    """What comes of the product."""

    out: Array
    pre_scale: Array | None = None
    bias: Array | None = None


def multi_gemm(
    plan: Builder, x: Array, h: Array, pad: Array | None, right: Right, laid: Laid | None, bank: Any, found: Routes,
    shape: Shape, wanted: Wanted, p: float = 0.0, masked: bool = False,
) -> None:  # fmt: skip
    """``masked``: the mask of dropout is on the term of low rank."""
    out, pre_scale, bias = wanted
    (M, K), N, R, G = x.shape, out.shape[1], h.shape[1], bank.A.shape[0]
    if out.numel == 0:
        return
    w, b = right.w, right.b
    flags = (found.g is not None, bias is not None, pre_scale is not None)
    by_bank, by_r, by_n = (b.stride[0], b.stride[2], b.stride[1]) if right.trans else b.stride
    config = shape.config
    if config is None:
        wide = plan.temp(out.shape, torch.float32)
        plan.product(wide, x, w)
        plan.launch(
            multi_epilogue_kernel, (cdiv(M, EPILOGUE_M), cdiv(N, EPILOGUE_N)),
            (wide, h, b, out, pre_scale, found.g, bias, found.ids, bank.offsets, found.ranks, found.route,
             bank.seed if masked else None, threshold(p), 1 / (1 - p), M, N, R, G, h.stride[0], by_bank, by_r, by_n),
            (found.ranks is not None, *flags, masked, "ieee", EPILOGUE_M, EPILOGUE_N, min(32, shape.BLOCK_R)), 4, 2,
        )  # fmt: skip
        return
    if config.tma:
        bm, bn, bk = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
        trans_b = w.stride[0] == 1 and w.stride[1] != 1
        width = bn // 2 if config.EPILOGUE_SUBTILE else bn
        block = (bn, bk) if trans_b else (bk, bn)
        count = cdiv(M, bm) * cdiv(N, bn)
        programs = min(count, plan.device.num_sms) if config.persistent else count
        assert pad is not None and laid is not None
        plan.launch(
            multi_gemm_tma_kernel, (programs,),
            (Tile(x, (bm, bk)), Tile(w.T if trans_b else w, block), Tile(pad, (bm, bk)), Tile(laid.matrix, block),
             Tile(out, (bm, width)), None if pre_scale is None else Tile(pre_scale, (bm, width)), found.g, bias,
             found.ids, found.route, found.steps, M, N, K, R, laid.height, programs),
            (trans_b, *flags, bm, bn, bk, config.EPILOGUE_SUBTILE, config.GROUP_M, not INTERPRETED),
            config.num_warps, config.num_stages,
        )  # fmt: skip
        return
    plan.launch(
        multi_gemm_pointer_kernel, (cdiv(M, config.BLOCK_M) * cdiv(N, config.BLOCK_N),),
        (x, w, h, b, out, pre_scale, found.g, bias, found.ids, bank.offsets, found.ranks, found.route, M, N, K, R, G, *x.stride,
         *w.stride, h.stride[0], by_bank, by_r, by_n),
        (found.ranks is not None, *flags, config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, shape.BLOCK_R, config.GROUP_M),
        config.num_warps, config.num_stages,
    )  # fmt: skip


def lay(
    plan: Builder, right: Right, shape: Shape, dtype: torch.dtype, numbers: tuple[int, ...] | None, ranks: Array | None
) -> Laid | None:
    """The bank as the product by TMA reads it beside w: (N, R) each where the columns of w are contiguous, else (R, N)."""
    if shape.config is None or not shape.config.tma:
        return None
    trans_b = right.w.stride[0] == 1 and right.w.stride[1] != 1
    b = right.b if right.trans == trans_b else _turned(right.b)  # another layout of W than the usual
    return as_matrix(plan, b, dtype, not trans_b, shape.config.BLOCK_K, numbers, ranks)


def _turned(b: Array) -> Array:
    (G, P, Q), (by_bank, by_p, by_q) = b.shape, b.stride
    return replace(b, shape=(G, Q, P), stride=(by_bank, by_q, by_p))
