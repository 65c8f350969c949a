"""Backward of a layer whose tokens belong to many adapters, all in sorted order; see multi.py.

    dz = g_a dy     dm_a = sum_t dy v / c_a     dh = s_a dz B_a     dx = dz W + dh A_a     dA_a = dh^T x     dB_a = dz^T h

Sums run over the tokens of one adapter: a program owns what one segment and one strip of rows have in common, and a second pass
adds such parts in their order. No atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fdora.triton.codes import Packed
from fdora.triton.dequantize import G as Gain
from fdora.triton.dequantize import redo_lost, weight_in
from fdora.triton.dropout import wants_copy
from fdora.triton.fp8 import codes_config, dz_of_codes, grouped_backward, grouped_tile
from fdora.triton.kernels.multi_bwd import (
    multi_finish_kernel,
    multi_gated_kernel,
    multi_grad_kernel,
    multi_scale_kernel,
    multi_sum_kernel,
)
from fdora.triton.multi_dropped import CODES, TWO, Change, change_of, dropped_dx
from fdora.triton.multi_gemm import (
    Right,
    Routes,
    Wanted,
    behind,
    block_of,
    drawn,
    grouped,
    lay,
    low_rank_input,
    multi_gemm,
    routes,
    shape_of,
)
from fdora.triton.multi_rows import Seen, drop, is_apart, rank_table
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import MOST_ROWS, cdiv, grid_of
from fdora.triton.runtime.plan import Array
from fdora.triton.scale import tiny_of
from fdora.triton.sums import column_sums
from fdora.triton.tiles.configs import ScaleConfig, power_of_two, scale_config

FINISH = ((32, 32), (256, 4))  # columns and strips: where an adapter has many strips, and where adapters are many
SUM = 1024


class GradConfig(NamedTuple):
    """Tile of u_a^T v_a: along the rank, along the other side, and tokens at a time."""

    BLOCK_R: int
    BLOCK_N: int
    BLOCK_T: int
    num_warps: int
    num_stages: int


def grad_config(R: int, half: bool) -> GradConfig:
    """Segments are short, so that programs beside each other count for more than tokens under way (h200/multi_tiles.json)."""
    if not half:
        return GradConfig(min(32, power_of_two(R)), 64, 32, 4, 3)
    return GradConfig(64, 128, 32, 4, 4) if R > 32 else GradConfig(power_of_two(R), 128, 64, 4, 3)


class Out(NamedTuple):
    """Where the gradients go; None for what nobody wants."""

    dx: Array | None
    dA: Array | None
    dB: Array | None
    dm: Array | None
    dc: Array | None
    dbias: Array | None


class Given(NamedTuple):
    """What a backward reads, sorted."""

    dy: Array
    x: Array
    bank: Any
    h: Array | None
    kept: Array | None
    pre_scale: bool
    scaled: bool = False  # dy is dz
    other: Array | None = None  # dx of another layer, to be added
    codes: Packed | None = None  # of W, where nothing reads it dense


def words_of(product: str) -> str:
    """What a backward does, with this for dx."""
    return f"one pass for dz and the sums over tokens, then {product} for dx; sums of each adapter by segments"


def backward(plan: Builder, of: Given, numbers: tuple[int, ...] | None, out: Out) -> None:
    dy, x, bank, h, *_ = of
    M, t = x.shape[0], x.dtype
    if M == 0:
        for each in out:
            if each is not None:
                plan.zero(each)
        return
    R = bank.A.shape[1]
    dz = dy if of.scaled else plan.temp(dy.shape, t) if any(d is not None for d in out[:3]) else None
    W, G, codes = bank.W, bank.A.shape[0], None
    if isinstance(W, Packed):
        if out.dx is not None and bank.experts:
            codes = grouped_tile(plan, G, W, R, out.dx, None, True)
        elif out.dx is not None:
            codes = codes_config(plan, W, R, out.dx)
        if codes is not None:
            plan.path = words_of("one product of codes")
        again = bank.experts and (out.dm or out.dc) is not None and not of.pre_scale
        reads = codes is None and (out.dx is not None or again)
        bank = bank._replace(W=stack_in(plan, bank, t) if reads else None)
        of = of._replace(bank=bank, codes=None if reads else W)
    if codes is not None and bank.experts:
        shape = grouped(codes, G)
    elif codes is not None or bank.W is None:
        shape = behind(R)._replace(experts=G if bank.experts else 0)
    else:
        # from sm_100 on the positions of a mask are one more tile
        extra = of.other is not None or (bank.seed is not None and plan.device.capability >= 100)
        shape = shape_of(plan, dz or dy, out.dx or x, bank.W, R, G, extra, bank.mode == "peft")
    bank = bank._replace(ranks=rank_table(plan, numbers))
    right = Right(W.codes.T if codes is not None else bank.W, bank.A, False)  # of codes it says how b has to lie
    seen = None if h is None else Seen(h, bank.offsets)
    laid = None if out.dx is None else lay(plan, right, shape, t, numbers, bank.ranks, seen=seen)
    found = routes(plan, bank, M, shape, laid, out.dx)
    change = change_of(plan, dy, bank) if bank.mode == "peft" and out.dx is not None else None
    fused = not of.scaled and _scale(plan, of, found, dz, out, change)
    if dz is None:
        return
    product: Any = None
    if codes is not None and bank.experts:
        product = grouped_backward(plan, dz, W, bank.offsets)
    elif codes is not None:
        product = partial(dz_of_codes, plan, dz=dz, W=W, config=codes)
    if out.dx is not None or out.dA is not None:
        dh = plan.temp((M, R), t)
        pad = low_rank_input(plan, dz, bank.B, True, bank, shape, dh, numbers, False, "" if bank.seed is None else "gain")
        if out.dx is not None:
            plain = found._replace(g=None)
            if change is not None:
                plan.path = words_of(CODES if change.tile else TWO)
                dropped_dx(plan, out.dx, dy, change, dh, right, bank, plain, shape)
            else:
                wanted = Wanted(out.dx, residual=of.other)
                multi_gemm(plan, dz, dh, pad, right, laid, bank, plain, shape, wanted, product)
        if out.dA is not None:
            _gradient_of_A(plan, out.dA, dh, x, bank, found)
    if out.dB is not None and not fused:
        assert h is not None
        gradient_of_bank(plan, out.dB, dz, h, bank, False)


def stack_in(plan: Builder, bank: Any, dtype: torch.dtype) -> Array:
    """A W of codes, dense: of experts one for each."""
    W = weight_in(plan, bank.W, dtype)
    (G, N, _), (pitch, _) = bank.B.shape, W.stride
    return replace(W, shape=(G, N, W.shape[1]), stride=(N * pitch, pitch, 1)) if bank.experts else W


def _scale(plan: Builder, of: Given, found: Routes, dz: Array | None, out: Out, change: Change | None) -> bool:
    """dz, dm, dc and dbias; and dB, where its parts are few beside dz: whether that is so."""
    dy, _, bank, h, kept, *_ = of
    (M, N), (G, R, _) = dy.shape, bank.A.shape
    config = scale_config(int(M), N, R, dy.dtype != torch.float32, plan.device.capability)
    rows = config.ROWS * longer(M, N, G, config.ROWS, plan.device.num_sms)
    pairs = cdiv(M, rows) + G
    need_m, need_bias = out.dm is not None or out.dc is not None, out.dbias is not None
    block_r = config.BLOCK_R if out.dB is not None and int(4 * pairs * R) < int(M) else 0
    shapes: tuple[Any, ...] = (need_m and (pairs, N), need_bias and (pairs, N), block_r and (pairs, N, R))
    partial_m, partial_bias, partial_B = (plan.temp(shape) if shape else None for shape in shapes)
    if dz is not None or need_m or need_bias:
        grid, flat = grid_of(cdiv(N, config.BLOCK_N), pairs)
        given = {"dy": dy, "saved": kept, "h": h if block_r else None, "dz": dz, "M": M, "G": G, "N": N, "R": R, "FLAT": flat}
        given |= {"partial_m": partial_m, "partial_bias": partial_bias, "partial_B": partial_B}
        given |= {"stride_hm": 0 if h is None else h.stride[0], "BLOCK_R": block_r, "ROWS": rows, "BLOCK_G": block_of(G)}
        apart = change is not None and is_apart(bank)
        given |= {"beside": change and change.z, "lead": 1.0 if change and change.tile else 0.0, "gain": 1 / (1 - bank.p)}
        given |= {"APART": apart, "seed": bank.seed if apart else None}
        plan.launch(multi_scale_kernel, grid, given, found, bank, config)
    if out.dB is not None and partial_B is not None:
        _sum(plan, partial_B, bank, out.dB, M, rows)
    if out.dbias is not None:
        assert partial_bias is not None
        if len(out.dbias.shape) == 2:
            _sum(plan, partial_bias, bank, out.dbias, M, rows)
        else:
            column_sums(plan, partial_bias, out.dbias)
    if need_m:
        _finish(plan, of, out, partial_m, rows)
    return partial_B is not None


def _finish(
    plan: Builder,
    of: Given,
    out: Out,
    partial_m: Any,
    rows: int,
    gated: tuple[Any, ...] = (None, None, "", False),
) -> None:
    """dm and dc from their parts. ``gated``: gate, up and act, where dy is da, and whether the layer is up."""
    (N, R), G, K = of.bank.B.shape[1:], of.bank.A.shape[0], of.x.shape[1]
    finish_n, finish_t = FINISH[partial_m.shape[0] < 8 * G]
    given = {"dy": of.dy, "x": of.x, "w": of.bank.W, "h": of.h, "b": of.bank.B, "partial_m": partial_m}
    given |= {"M": of.x.shape[0], "G": G, "N": N, "K": K, "R": R, "SAVED_PRE_SCALE": of.pre_scale, "tiny": tiny_of(of.dy.dtype)}
    given |= {"ROWS": rows, "BLOCK_N": finish_n, "BLOCK_T": finish_t, **named("gate up ACT OF_UP", gated)}
    warps = 8 if gated[2] else 4  # to form d gate takes registers that 4 lack
    plan.launch(multi_finish_kernel, (cdiv(N, finish_n), G), given, out, of.bank, num_warps=warps)
    if of.codes is not None and not of.pre_scale:
        b, experts = of.bank, bool(of.bank.experts)
        redo_lost(plan, of.codes, of.dy, of.x, of.h, b.B, Gain(b.m, b.c), out.dm, out.dc, b.offsets, experts)


def gated_config(capability: int) -> ScaleConfig:
    """us on an H200, 6063 tokens of four adapters, 14336 columns, whose bytes take 207 at the rate of a sum of two tensors:
    32 x 64 with three tiles under way 219, with two 285, 64 x 64 313, 16 x 128 221; the sums of strips of 128 rows
    then take 28, of 256 13 (`python -m bench tune bank_gated`)."""
    return ScaleConfig(32, 64, 256, 0, 4, 3 if 90 <= capability < 120 else 1)


def gated_scale(plan: Builder, pair: Sequence[Given], act: str, dzs: Sequence[Array], outs: Sequence[Out]) -> None:
    """dz, dm and dc of gate and of up, whose dy are d gate and d up: formed of da in the same pass.

    Bytes: da, gate and up read, both dz written, 5 M N; the activation's pass and one for each layer move 11."""
    da, _, bank, *_ = pair[0]
    (M, N), G = da.shape, bank.A.shape[0]
    config = gated_config(plan.device.capability)
    rows = config.ROWS * longer(M, N, G, config.ROWS, plan.device.num_sms)
    pairs, (gate, up) = cdiv(M, rows) + G, (of.kept for of in pair)
    partials = [plan.temp((pairs, N)) for _ in pair]
    given = {"da": da, "gate": gate, "up": up, "offsets": bank.offsets, "M": M, "G": G, "N": N, "ACT": act, "ROWS": rows}
    given |= named("m_gate c_gate m_up c_up", [t for of in pair for t in (of.bank.m, of.bank.c)]) | named("dz_gate dz_up", dzs)
    given |= named("partial_gate partial_up", partials) | {"BLOCK_G": block_of(G)}
    grid, given["FLAT"] = grid_of(cdiv(N, config.BLOCK_N), pairs)
    plan.launch(multi_gated_kernel, grid, given, config)
    for of, out, partial_m, of_up in zip(pair, outs, partials, (False, True), strict=True):
        if out.dm is not None or out.dc is not None:
            _finish(plan, of, out, partial_m, rows, (gate, up, act, of_up))


def _sum(plan: Builder, partial: Array, bank: Any, out: Array, M: int, rows: int) -> None:
    """The parts of each adapter's sum, of so many ``rows`` each, added in their order into ``out`` (G, ...)."""
    G, size = out.shape[0], out[0].numel
    given = {"partial": partial, "offsets": bank.offsets, "out": out, "M": M, "G": G, "size": size, "ROWS": rows, "BLOCK": SUM}
    plan.launch(multi_sum_kernel, (cdiv(size, SUM), G), given)


def longer(M: int, N: int, G: int, rows: int, num_sms: int) -> int:
    """Strips this many times as long where segments are about as short as they are: else most are cut in two, and a program has
    half a tile. 8192 rows of 32 adapters took 1.25 of the pass of one, twice as long 1.08 of it, eight times 1.03. But were all
    tokens one adapter's, its strips must fill the GPU."""
    if 4 * G * rows <= M:
        return 1
    return 8 if cdiv(M, 8 * rows) * cdiv(N, 64) >= 2 * num_sms else 2


def _gradient_of_A(plan: Builder, out: Array, dh: Array, x: Array, bank: Any, found: Routes) -> None:
    """dh has the factor of dropout."""
    masked = bank.seed is not None
    if masked and wants_copy(dh.shape[1]):
        x, masked = drop(plan, x, bank, found, False), False
    gradient_of_bank(plan, out, dh, x, bank, True, masked)


def gradient_of_bank(
    plan: Builder,
    out: Array,
    u: Array,
    v: Array,
    bank: Any,
    rank_first: bool,
    masked: bool = False,
    gain: float | None = None,
) -> None:
    """u_a^T v_a over the tokens of each adapter: (M, P), (M, Q) -> (G, P, Q). ``masked``: v is dropped, and ``gain`` is what
    survivors are multiplied by, unless u is."""
    (M, P), Q, (G, R, _) = u.shape, v.shape[1], bank.A.shape
    if not out.numel:
        return
    config = grad_config(R, u.dtype != torch.float32)
    block_p, block_q = (config.BLOCK_R, config.BLOCK_N) if rank_first else (config.BLOCK_N, config.BLOCK_R)
    blocks = cdiv(P, block_p) * cdiv(Q, block_q)
    # Were all tokens one adapter's, so many parts would still keep the GPU busy; but they must be few beside u and v.
    tokens = int(M)
    few = tokens * (P + Q) // (8 * P * Q) - G
    strips = max(1, min(cdiv(3 * plan.device.num_sms, blocks), cdiv(tokens, 4 * config.BLOCK_T), 16, few, MOST_ROWS - G))
    rows = 1 << (cdiv(tokens, strips) - 1).bit_length() if strips > 1 else 0
    single = rows == 0
    places = G if single else cdiv(M, rows) + G
    target = out if single else plan.temp((places, P, Q))
    given = {"u": u, "v": v, "out": target, "M": M, "G": G, "P": P, "Q": Q, "R": R}
    given |= {"RANK_FIRST": rank_first, "SINGLE": single, "ROWS": rows, "MASKED": masked, "gain": gain} | drawn(bank, masked)
    given |= {"BLOCK_P": block_p, "BLOCK_Q": block_q, "BLOCK_G": block_of(G)}
    plan.launch(multi_grad_kernel, (cdiv(P, block_p), cdiv(Q, block_q), places), given, bank, config)
    if not single:
        _sum(plan, target, bank, out, M, rows)
