"""The product of a layer whose tokens belong to many adapters: x W^T does not ask whose a token is, what follows does.

    out = g_a (x W + h B_a) + bias        a: the adapter of the row

A tile of rows knows the segments that meet it (:class:`Routes`, written on the device). h lies twice: (M, R), and by pairs of
a tile and a segment with zeros in the rows of others, so that the steps of low rank of a tile are whole products, in the same
loop as those of x W (see gemm.py). g of a tile of one adapter is a vector; elsewhere each row fetches its own. Zeros times what
is not finite are NaN: an adapter that holds such numbers is left out of tiles that others share, and gets a g of NaN.

The same product serves experts, w (G, K, N) and bias (G, N): a tile of rows then has one segment, whose first tile begins
at its first row, and reads the matrix of that segment. Rows behind the last segment are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from fdora.triton.dropout import threshold
from fdora.triton.fp8 import Grouped
from fdora.triton.gemm import tiled
from fdora.triton.kernels.multi import PARTS, multi_h_kernel, multi_h_sum_kernel, multi_routes_kernel
from fdora.triton.kernels.multi_gemm import (
    multi_codes_kernel,
    multi_epilogue_kernel,
    multi_gemm_pointer_kernel,
    multi_gemm_tma_kernel,
)
from fdora.triton.multi_rows import Laid, Seen, as_matrix, is_apart
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv, grid_of, is_tma_compatible
from fdora.triton.runtime.plan import Array, Scalar
from fdora.triton.tiles.configs import GemmConfig, power_of_two
from fdora.triton.tiles.product import Ask, bank_config, grouped_config

BLOCK_GN = 1024  # columns of g that a program writes
TILE = {"BLOCK_M": 64, "BLOCK_N": 64}  # of the pass behind cuBLAS
APART = 1024  # tokens: cuBLAS and a pass out of the cache take less than tiles of several adapters and a look at the bank
UNDRAWN: dict[str, Any] = {"seed": None, "threshold": 0, "APART": False}
MOST_AT = 2**31 - 1  # TMA counts rows in int32
TAIL_M = 64  # rows that a program fills with zeros
SUM_M = 16  # rows that a program adds the parts of
FEW_BYTES = 96 << 10  # of shared memory, of the 99 KiB that an sm_86 or an sm_120 gives a program
# Of experts in float32: digits of float32, whatever matmul precision torch is set to.
EXPERTS_F32 = GemmConfig(False, 64, 64, 32, 8, False, False, 4, 2)


def block_of(G: int) -> int:
    """How many offsets are looked at at once."""
    return power_of_two(min(G, 64))


class HConfig(NamedTuple):
    """Tile of x A_a^T and step along K."""

    BLOCK_M: int
    BLOCK_R: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    SPLIT: int = 1  # programs that share K; a pass behind them adds what they have


def h_config(M: int, K: int, ranks: Sequence[int], half: bool, beside: bool, experts: bool, device: Device) -> HConfig:
    """Of the rank of each adapter. What counts are bytes under way on all multiprocessors: programs that are fewer share K.
    us on an H200, with the pass behind them, by a script (whole calls: h200/bank_low): 2048 tokens of ranks 8 to 64, K = 4096
    and 14336, 12 and 26 where programs with all of K take 19 and 55; at 8192 tokens these are the faster. Wider steps pay where
    there is one program for each multiprocessor, or many ``beside`` another kernel. Experts were not timed."""
    R, block_m = max(ranks), 32 if half and max(ranks) <= 32 else 64
    block_r = power_of_two(R) if R <= 32 else 64
    programs = (cdiv(M, block_m) + len(ranks)) * sum(cdiv(r, block_r) for r in ranks) // len(ranks)
    if not half:
        return HConfig(32, block_r, 32, 4, 2) if R <= 32 else HConfig(64, 64, 32, 4, 2)
    room = int(device.num_sms * (3.5 if R <= 32 else 1.9))  # programs that are there at once, less than two turns of them
    split = 1 if experts else max(1, min(PARTS.value, K // 1024, room // programs))
    if R <= 32:
        return HConfig(32, block_r, 128, 4, 4, split)
    if split == 1 and not experts and programs <= device.num_sms:
        return HConfig(64, 64, 128, 4, 4)
    if beside and 2 * programs > 3 * device.num_sms:
        return HConfig(64, 64, 128, 8, 3)
    return HConfig(64, 64, 64, 4, 4 if programs > 2 * device.num_sms else 6, split)


class Shape(NamedTuple):
    """How the product runs: its tile, by TMA or by pointers; or by cuBLAS with one pass behind it."""

    config: GemmConfig | None
    BLOCK_M: int
    BLOCK_R: int  # a step of low rank
    experts: int = 0  # how many matrices w has; 0: one for all

    @property
    def tma(self) -> bool:
        return self.config is not None and self.config.tma


def turned(t: Array) -> Array:
    """A matrix, or each of a stack, transposed."""
    shape, stride = (*t.shape[:-2], t.shape[-1], t.shape[-2]), (*t.stride[:-2], t.stride[-1], t.stride[-2])
    return replace(t, shape=shape, stride=stride)


def joined(w: Array) -> Array | None:
    """A stack as one matrix, (G * P, Q) or, where columns have no gaps, its transpose (G * Q, P); None where it is none."""
    rows = turned(w) if has_columns(w) else w
    if len(w.shape) == 2:
        return rows
    G, P, Q = rows.shape
    by_w, by_p, by_q = rows.stride
    return replace(rows, shape=(G * P, Q), stride=(by_p, by_q)) if by_w == P * by_p or G == 1 else None


def has_columns(w: Array) -> bool:
    """Whether the columns of a matrix have no gaps, and its rows do."""
    return w.stride[-2] == 1 and w.stride[-1] != 1


def shape_of(plan: Builder, x: Array, out: Array, w: Array, R: int, adapters: int, extra: bool, apart: bool) -> Shape:
    """w (K, N), or (G, K, N) of experts. ``extra``: one more tile leaves at the end. ``apart``: the base product must be there
    first, since dropout's mask is not its, or since its rows are not sorted."""
    (M, K), N, on = x.shape, out.shape[1], plan.device
    trans, matrix = has_columns(w), joined(w)
    if adapters * max(K, N, R + 256) > MOST_AT:  # rows of a stack or of a bank, with room for the last step of each rank
        matrix = None
    G, f32, tma = w.shape[0] if len(w.shape) == 3 else 0, x.dtype == torch.float32, False
    if not G and (f32 or apart or M <= APART):
        return behind(R)
    if matrix is not None:
        tma = all(map(is_tma_compatible, (x, out, matrix)))
    ask = Ask(int(M), N, K, R, trans, extra, tma, on.capability, on.num_sms)
    config = EXPERTS_F32 if f32 else grouped_config(ask, G) if G else bank_config(ask, adapters)
    return Shape(config, config.BLOCK_M, config.BLOCK_K if config.tma else min(config.BLOCK_K, power_of_two(R)), G)


def grouped(config: GemmConfig, G: int) -> Shape:
    """Experts of codes. A step of low rank has as many bytes as one of codes."""
    return Shape(config, config.BLOCK_M, config.BLOCK_K // 2, G)


def behind(R: int) -> Shape:
    """One pass behind a base product that is there."""
    return Shape(None, TILE["BLOCK_M"], min(64, power_of_two(R)))


class Routes(NamedTuple):
    """Whose tokens are where, for tiles of BLOCK_M rows."""

    ids: Array | None  # (M,) segment of each token; not of experts
    keys: Array | None  # (2, M) of each token what its mask is drawn from, and the threshold; of dropout
    route: Array  # (tiles + 1, 4) first and last segment, steps of low rank and where they begin; of experts: kernels/multi.py
    steps: Array | None  # adapter * 32768 + slab
    g: Array | None  # (G + 1, N), 1 behind the last adapter


def most_tiles(M: int, shape: Shape) -> int:
    """Tiles of rows that there may be."""
    return cdiv(M, shape.BLOCK_M) + shape.experts


def routes(
    plan: Builder,
    bank: Any,
    M: int,
    shape: Shape,
    laid: Laid | None = None,
    out: Array | None = None,
    pre_scale: Array | None = None,
) -> Routes:
    """``laid`` says which adapters hold what is not finite; they get a g that is a NaN. ``out`` and ``pre_scale``: what the
    product will write; of experts, rows behind the last segment are filled."""
    (G, R, _), N, experts = bank.A.shape, bank.B.shape[1], shape.experts > 0
    out, pre_scale = (out, pre_scale) if experts else (None, None)
    tiles, span = most_tiles(M, shape), cdiv(R, shape.BLOCK_R)
    route = plan.temp((tiles + 1, 4), torch.int32)
    ids = None if experts else plan.temp((M,), torch.int32)
    steps = None if experts else plan.temp(((tiles + G) * span,), torch.int32)
    flags, tails = (None, False) if laid is None else (laid.flags, laid.tails is not None)
    with_g = bank.m is not None or flags is not None
    g = plan.temp((G + 1, N)) if with_g else None
    keys = None if bank.seed is None else plan.temp((2, M), torch.int32)
    blocks = (G + 1) * cdiv(N, BLOCK_GN) if with_g else 0
    width = 0 if out is None else out.shape[1]
    grid = (tiles + blocks + (cdiv(M, TAIL_M) if width else 0),)
    made = Routes(ids, keys, route, steps, g)
    given = {"flags": flags, "out": out, "pre_scale": pre_scale, "M": M, "G": G, "N": N, "R": R, "span": span, "tiles": tiles}
    given |= {"blocks": blocks, "width": width, "FLAGS": 0 if flags is None else flags.shape[1], "EXPERTS": experts}
    given |= drawn(bank, keys is not None)
    given |= {"TAILS": tails, "BLOCK_M": shape.BLOCK_M, "BLOCK_R": shape.BLOCK_R, "BLOCK_G": block_of(G), "BLOCK_N": BLOCK_GN}
    plan.launch(multi_routes_kernel, grid, given, made, bank)
    return made


def low_rank_input(
    plan: Builder,
    x: Array,
    f: Array,
    trans: bool,
    bank: Any,
    shape: Shape,
    h: Array,
    numbers: Sequence[int] | None,
    beside: bool = False,
    dropout: Literal["", "gain", "mask"] = "",
) -> Array | None:
    """h = s_a x f_a^T; f (G, R, K), or (G, K, R) where ``trans``. Returns it by pairs, where the product wants that, and of
    experts as TMA reads it. ``numbers``: the ranks, where they differ. ``beside``: the next kernel runs beside this one.
    ``dropout``: times 1 / (1 - p), and of the dropped x for "mask"."""
    (M, K), R, G = x.shape, h.shape[1], f.shape[0]
    by_r, by_k = f.stride[:0:-1] if trans else f.stride[1:]
    padded, tile, half = shape.tma, shape.BLOCK_M, x.dtype != torch.float32
    pairs = cdiv(M, tile) + G
    width, experts = cdiv(R, 8) * 8, shape.experts > 0
    pad: Array | None = h
    if experts and padded and is_tma_compatible(h):
        padded = False
    else:
        pad = plan.temp((M if experts else pairs * tile, R), x.dtype, (width, 1)) if padded else None
    config = h_config(int(M), K, numbers or (R,) * G, half, beside, experts, plan.device)
    config = config._replace(BLOCK_M=min(tile, config.BLOCK_M))
    if dropout == "mask" and config.BLOCK_M == 64:  # as many rows make a product that reads registers (private.NOT_AHEAD)
        config = HConfig(32, config.BLOCK_R, 128, 4, 4, config.SPLIT)
    if half and f.itemsize == 4 and not 90 <= plan.device.capability < 120:  # sm_86 and sm_120 have room for fewer such tiles
        room = FEW_BYTES // ((2 * config.BLOCK_M + 4 * config.BLOCK_R) * config.BLOCK_K)
        config = config._replace(num_stages=min(config.num_stages, 1 + room))
    split, drops = config.SPLIT, drawn(bank, dropout != "")
    parts = plan.temp((split, M, R)) if split > 1 else None
    out: dict[str, Any] = {"h": h, "pad": pad if padded else None, "parts": parts, "split": split, "M": M, "G": G, "R": R}
    s, only_s = (None, bank.s) if isinstance(bank.s, Scalar) else (bank.s, None)
    out |= {"s": s, "only_s": only_s, "gain": 1 / (1 - bank.p) if dropout else None, "stride_pm": width}
    out |= {"EXPERTS": experts, "TILE": tile, "BLOCK_G": block_of(G)}
    grid, flat = grid_of(cdiv(R, config.BLOCK_R), pairs * (tile // config.BLOCK_M), split)
    given = {"x": x, "f": f, "K": K, "stride_fk": by_k, "stride_fr": by_r, "FLAT": flat, "PDL": beside and split == 1}
    plan.launch(multi_h_kernel, grid, out | given | drops | {"MASKED": dropout == "mask"}, bank, config)
    if parts is not None:
        grid, flat = grid_of(cdiv(R, config.BLOCK_R), pairs * (tile // SUM_M))
        given = {"seed": drops["seed"], "APART": drops["APART"], "BLOCK_M": SUM_M, "FLAT": flat, "PDL": beside}
        plan.launch(multi_h_sum_kernel, grid, out | given, bank, config)
    return pad


def drawn(bank: Any, drops: bool) -> dict[str, Any]:
    """What a kernel draws masks from."""
    return {"seed": bank.seed, "threshold": threshold(bank.p), "APART": is_apart(bank)} if drops else UNDRAWN


class Right(NamedTuple):
    """w (K, N), of experts (G, K, N), and the bank b of (R, N) matrices: (G, R, N), or (G, N, R) where ``trans``."""

    w: Array
    b: Array
    trans: bool


class Wanted(NamedTuple):
    """What comes of the product, ``residual`` added; and under PEFT's dropout what the pass behind it has beside it, see
    multi_dropped.py: another "product" in half precision, or one of "codes"."""

    out: Array
    pre_scale: Array | None = None
    bias: Array | None = None
    other: Array | None = None
    OTHER: str = ""
    residual: Array | None = None


def multi_gemm(
    plan: Builder,
    x: Array,
    h: Array,
    pad: Array | None,
    right: Right,
    laid: Laid | None,
    bank: Any,
    found: Routes,
    shape: Shape,
    wanted: Wanted,
    of_codes: Callable[[Array], None] | Grouped | None = None,
) -> None:
    """``found``: its keys mask the term of low rank where there is no other g. ``of_codes``: what writes x w where that is a
    product of codes; of experts, what is multiplied."""
    codes = of_codes if isinstance(of_codes, Grouped) else None
    out, pre_scale, *_, residual = wanted
    (M, K), N, R, G = x.shape, out.shape[1], h.shape[1], bank.A.shape[0]
    if out.numel == 0:
        return
    w, b = right.w, right.b
    by_r, by_n = b.stride[:0:-1] if right.trans else b.stride[1:]
    config, experts, most = shape.config, shape.experts > 0, most_tiles(M, shape)
    given: dict[str, Any] = {"M": M, "N": N, "R": R}
    by_pointers = {"h": h, "b": b, "G": G, "stride_br": by_r, "stride_bn": by_n}
    if config is None:
        wide = plan.temp(out.shape) if found.keys is not None and of_codes is None else out
        of_codes(wide) if callable(of_codes) else plan.product(wide, x, w)
        given |= {"v": wide, "keep_scale": 1 / (1 - bank.p), "BLOCK_R": min(32, shape.BLOCK_R), "APART": is_apart(bank)}
        plan.launch(multi_epilogue_kernel, "M N", given | by_pointers, found, wanted, bank, TILE, num_stages=2)
        return
    count = most * cdiv(N, config.BLOCK_N)
    given |= {"K": K, "BIAS_SPAN": N if experts else 0, "MOST": most}
    if config.tma:
        trans_b, matrix = has_columns(w), joined(w) if codes is None else codes.w
        programs = min(count, plan.device.num_sms) if config.persistent else count
        assert pad is not None and laid is not None and matrix is not None
        slab = config._replace(BLOCK_K=shape.BLOCK_R)
        ends = {"out": out, "pre_scale": pre_scale, "residual": residual}
        given |= tiled(config, trans_b, {"x": codes.x if codes else x}, {"w": matrix}, ends)
        low: dict[str, Any] = tiled(slab, trans_b, {"h": pad}, {"b": laid.matrix, "tails": laid.tails}, {})
        given |= named("out_at pre_scale_at", (out, pre_scale) if experts else (None, None))
        given["SPAN"] = laid.height
        if codes is not None:
            low |= {"BLOCK_R": shape.BLOCK_R, "W_SPAN": codes.down, "K_SPAN": codes.along}
            del low["tails"], given["residual"]  # experts have none
            plan.launch(multi_codes_kernel, (count,), given | low, found, wanted, bank, config, codes.scales)
            return
        given |= {"W_SPAN": (N if trans_b else K) if experts else 0, "EXPERTS": experts}
        given |= {"PROGRAMS": programs, "TRANS_B": trans_b}
        plan.launch(multi_gemm_tma_kernel, (programs,), given | low, found, wanted, bank, config)
        return
    given |= {"x": x, "w": w, "BLOCK_R": shape.BLOCK_R, "EXPERTS": experts}
    plan.launch(multi_gemm_pointer_kernel, (count,), given | by_pointers, found, wanted, bank, config)


def lay(
    plan: Builder,
    right: Right,
    shape: Shape,
    dtype: torch.dtype,
    numbers: tuple[int, ...] | None,
    ranks: Array | None,
    beside: bool = False,
    seen: Seen | None = None,
) -> Laid | None:
    """The bank as the product by TMA reads it beside w: (N, R) each where the columns of w are contiguous, else (R, N).
    ``beside``: it runs beside the kernel ahead. ``seen``: as of as_matrix."""
    if shape.config is None or not shape.tma:
        return None
    trans_b = has_columns(right.w)
    b = right.b if right.trans == trans_b else turned(right.b)  # another layout of W than the usual
    return as_matrix(plan, b, dtype, not trans_b, shape.BLOCK_R, numbers, ranks, shape.experts > 0, beside, seen)


def copies_beside(device: Device, shape: Shape) -> bool:
    """Whether forward looks through the bank beside x A_a^T, which waits for its loads more than for bytes. That one
    begins: behind the other its programs are let in unevenly, and it took 35 us for 28."""
    return device.supports_pdl and shape.experts == 0 and shape.tma
