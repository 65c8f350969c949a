"""One matrix product with the low-rank term and everything elementwise inside: nothing of size (M, N) but the result.

    out = epilogue( x W + mask( x' W + h B ) )      x, x' (M, K), W (K, N), h (M, r), B (r, N)
    epilogue(v) = v | g v + bias (+ residual) | v + (g - 1) residual + bias | v + residual | m v (+ residual)
    g = m / max(c, EPS), one value per column; in the last m has one per row

Forward: W and B are the transposed weights, h = s x A^T. Backward: x is dz, W the weight as it is, h = s dz B, B is A.
The mask (dropout of the adapter's input) belongs to the low-rank term only, so that term is accumulated first and masked in
registers. The kernels accumulate in float32 and round once. In "accumulate" the residual may be ``out`` itself: a program
reads a tile before it writes it, and no other program touches it.

On Hopper and data-centre Blackwell tiles travel by TMA. Both products then run in *one* loop of K / BLOCK_K + r / BLOCK_K
steps that picks its pair of descriptors by a select, and that loop is flattened into the loop over tiles: the copies of the
next tile start under the last products and the epilogue of this one. On an H100 that is as fast as cuBLAS alone on x W (see
bench/NOTES.md); two loops after each other lose 5 to 10 %. Elsewhere, and where strides rule TMA out, pointers are used.

Rows that TMA fills with zeros take it longer than rows that it fetches (bench/NOTES.md). So the last tile begins where it ends
with the last row: what it shares with the one before it is written twice, with the same bits. Not so where it would be added
twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fdora.triton.copy import stacked
from fdora.triton.dropout import has_origin, threshold
from fdora.triton.kernels.gemm import gemm_pointer_kernel, gemm_tma_kernel
from fdora.triton.runtime import Array, Builder, Tile, cdiv, is_tma_compatible
from fdora.triton.runtime.device import beside_others
from fdora.triton.tiles.configs import GemmConfig, power_of_two
from fdora.triton.tiles.fp8 import RANKS
from fdora.triton.tiles.product import Ask, fused_config


class Epilogue(NamedTuple):
    """What happens to the accumulator: "none", "scale", "residual", "dropped", "accumulate", "rows" or "table"."""

    kind: str = "none"
    m: Array | None = None
    c: Array | None = None
    bias: Array | None = None
    residual: Array | None = None


class Masked(NamedTuple):
    """The dropout mask on the low-rank term, and the operand x' whose product is masked with it."""

    seed: Array | None = None
    p: float = 0.0
    x: Array | None = None


class Operand(NamedTuple):
    """W and B of the product above. ``trans``: they are (N, K) and (N, r)."""

    w: Array
    b: Array | None
    trans: bool


class Scales(NamedTuple):
    """Of an x and a W of e4m3 codes, as the kernel names them: of W one for BN rows and BK columns, of x one for 128 columns of
    a token. BK is 0 where both have one for all columns, and W may have none."""

    x_scale: Array | None = None
    w_scale: Array | None = None
    groups: int = 1  # of BK columns
    BN: int = 1
    BK: int = 0


NO_EPILOGUE, UNMASKED, UNSCALED = Epilogue(), Masked(), Scales()
SHARE = 1 << 28  # multiplications that a program takes at least, 90 us: what begins and ends one costs 5
ROUNDS = 4  # of programs on each multiprocessor, at most, where they are no shorter than that


def gemm(
    plan: Builder,
    out: Array,
    x: Array,
    h: Array | None,
    right: Operand,
    epilogue: Epilogue = NO_EPILOGUE,
    masked: Masked = UNMASKED,
    pre_scale: Array | None = None,
    config: GemmConfig | None = None,
    scales: Scales = UNSCALED,
) -> None:
    """x (M, K), h (M, r), float16 or bfloat16 -> ``out`` and, where given, ``pre_scale``, both (M, N) and contiguous.

    ``config`` overrides the choice, for the command that measures tiles. x and W may be codes with ``scales``, with a tile by
    TMA, and there h and B may be None.
    """
    (M, K), N, r = x.shape, out.shape[1], 0 if h is None else h.shape[1]
    if out.numel == 0:
        return
    w, b = (right.w.T, right.b and right.b.T) if right.trans else right[:2]
    one_more_tile = pre_scale is not None or epilogue.residual is not None
    one_more_tile |= masked.seed is not None and plan.device.capability >= 100  # the positions of a mask are as large
    x_masked = masked.x
    given: dict[str, Any] = {"M": M, "N": N, "K": K, "R": r, "threshold": threshold(masked.p), "keep_scale": 1 / (1 - masked.p)}
    given |= {"EPILOGUE": epilogue.kind, "ORIGIN": has_origin(masked.seed)}
    trans_b, tma = by_tma(x, right, out, x_masked, pre_scale, epilogue.residual)
    on = plan.device
    config = config or fused_config(Ask(int(M), N, K, r, trans_b, one_more_tile, tma, on.capability, on.num_sms))
    if config.tma:
        bm, bn = config.BLOCK_M, config.BLOCK_N
        count = cdiv(M, bm) * cdiv(N, bn)
        programs = programs_of(count, bm * bn * K, on.num_sms) if config.persistent else count
        slab = config if scales is UNSCALED else config._replace(BLOCK_K=min(RANKS, power_of_two(h.shape[1] if h else 1)))
        one = scales is not UNSCALED and 0 < r <= RANKS
        flatten = config.persistent and masked.seed is None and (scales is UNSCALED or one or h is None)
        # beside codes, whose W only lies one way, A need not be turned as well
        trans_r = trans_b if b is None or scales is UNSCALED else b.stride[0] == 1
        w, b = w.T if trans_b else w, b and (b.T if trans_r else b)
        ends = {"out": out, "pre_scale": pre_scale, "residual": epilogue.residual}
        tiles = tiled(config, trans_b, {"x": x, "x_masked": x_masked}, {"w": w}, ends)
        tiles |= tiled(slab, trans_r, {"h": h and _fit(plan, h)}, {"b": b and _fit(plan, b)}, {})
        given |= {"BLOCK_R": slab.BLOCK_K, "PROGRAMS": programs, "TRANS_B": trans_b, "TRANS_R": trans_r}
        given |= {"FLATTEN": flatten, "ONE_SLAB": one}
        given["p"] = masked.p if epilogue.kind == "dropped" else None  # no argument of the kernels that are the same without it
        plan.launch(gemm_tma_kernel, (programs,), {**given, **tiles}, epilogue, masked, config, scales)
        return
    if x_masked is not None and x_masked.stride != x.stride:
        x, x_masked = stacked(plan, [x], x.dtype), stacked(plan, [x_masked], x.dtype)
    grid = (cdiv(M, config.BLOCK_M) * cdiv(N, config.BLOCK_N),)
    given |= {"x": x, "x_masked": x_masked, "w": w, "h": h, "b": b, "out": out, "pre_scale": pre_scale}
    given |= {"BLOCK_R": min(config.BLOCK_K, power_of_two(r))}
    plan.launch(gemm_pointer_kernel, grid, given, epilogue, masked, config)


def programs_of(tiles: int, each: int, num_sms: int) -> int:
    """Persistent programs, which share out tiles of ``each`` multiplications. Alone on the GPU one a multiprocessor.

    NCCL's kernels hold some multiprocessors for a while (24 of an H200's 132, for 1 ms a block of Llama-3.1-8B under FSDP2),
    and no program of ours finds room beside one. What should have run there starts when the others have ended, so that the
    product takes twice its time. Beside other processes there are more programs therefore, of so many tiles that they fill no
    more waves: those that wait go where one has ended. 14336 x 4096 and 4096 tokens beside a kernel that holds 24: 1.32 ms in
    132 programs, 0.91 in 896 (cuBLAS 0.78); alone 0.65 and 0.69.
    """
    if not beside_others():
        return min(tiles, num_sms)
    waves = cdiv(tiles, num_sms)
    most = max(1, waves // ROUNDS, SHARE // max(1, each))
    return min([cdiv(tiles, n) for n in range(1, min(most, waves) + 1) if n * cdiv(cdiv(tiles, n), num_sms) <= waves])


def by_tma(x: Array, right: Operand, *others: Array | None) -> tuple[bool, bool]:
    """Whether the columns of the right-hand W are contiguous, and whether all of these lie as TMA wants them."""
    w = right.w.T if right.trans else right.w
    trans_b = w.stride[0] == 1 and w.stride[1] != 1
    return trans_b, all(t is None or is_tma_compatible(t) for t in (x, w.T if trans_b else w, *others))


def _fit(plan: Builder, t: Array) -> Array:
    """A factor of the adapter as TMA takes it: itself, or a copy with padded rows (small beside W)."""
    return t if is_tma_compatible(t) else stacked(plan, [t], t.dtype)


Arrays = dict[str, Array | None]


def tiled(config: GemmConfig, trans_b: bool, left: Arrays, right: Arrays, ends: Arrays) -> dict[str, Tile | None]:
    """Descriptors: of rows of tokens, of the right-hand side, and of what lies as the result."""
    _, bm, bn, bk, _, subtile, *_ = config
    blocks = ((left, (bm, bk)), (right, (bn, bk) if trans_b else (bk, bn)), (ends, (bm, bn // 2 if subtile else bn)))
    return {name: None if t is None else Tile(t, block) for arrays, block in blocks for name, t in arrays.items()}
