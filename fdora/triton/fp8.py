"""Products of 8-bit numbers: x, and dz, as e4m3 codes by one kernel, then one product of codes with all inside.

    x -> codes, and a scale for each token, or for each 128 columns of one; once for all layers that read it
    y = g (sum over 128 columns of (code_x code_w) scale_x scale_w + h B^T) + bias,     h = s x A^T by cuBLAS in the dtype of x
    dx = dz W + D'(dh A)      dz W ~ q(dz a) (codes of W),  W = a (codes);  a of a row goes into dz before it is rounded

What q is and the numbers mean: fdora/eager/fp8.py. The product is that of gemm.py, whose tiles are of codes: cuBLAS rounds a
product with scales of rows to bfloat16, before g. Its sums have the tensor cores' precision, 14 bits on sm_90: of the base
product they lose 1.3e-3 at K = 4096, 2.9e-3 at 14336, 4.2e-3 there with scales of blocks; x as codes loses 2.6e-2. Roof on an
H200: twice the rate of half precision. Few tokens, and shapes that TMA does not take, are multiplied by the decoded W as if
nobody had asked for codes. e4m3 products want sm_89; without TMA pointers bring the tiles, forward.

Tensor cores take codes along the sum alone, which backward runs over the rows of W: its codes are turned in a pass of their own
for each call, 2 bytes a weight moved and 1 of temporary memory, unless W keeps them so (quant.with_transpose). dh A is inside
of the product; under dropout its sum comes first, is masked, and counts in units of the scales from there on.

MXFP8 and NVFP4 are multiplied by the scaled products of Blackwell (sm_100 and newer; compiled, never run), where both operands
have a scale for 32 or 16 numbers along the sum. Pointers bring their tiles. For dx W's codes get other scales as they are
turned; NVFP4, which that would round a second time, has no such dx.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora.quant import Lut4
from fdora.triton.codes import groups_of, has_ptx
from fdora.triton.copy import in_dtype, stacked
from fdora.triton.gemm import NO_EPILOGUE, Epilogue, Masked, Operand, Scales, by_tma, gemm
from fdora.triton.kernels.fp8 import (
    fp8_blocks_kernel,
    fp8_gemm_kernel,
    fp8_rows_kernel,
    mx_rows_kernel,
    nv_rows_kernel,
    turn_kernel,
)
from fdora.triton.runtime import Array, Builder, cdiv, is_tma_compatible, named
from fdora.triton.runtime.device import INTERPRETED
from fdora.triton.tiles.configs import GemmConfig, power_of_two
from fdora.triton.tiles.few import LIMIT
from fdora.triton.tiles.fp8 import fp8_config, grouped_fp8
from fdora.triton.tiles.product import Ask

BLOCK, TOKENS, ALL, TURNED, MX, NV = 128, 16, 1 << 30, 128, 32, 16
TILE_OF_MX = GemmConfig(False, 128, 128, 128, 8, False, False, 8, 3)  # no GPU has timed it
E4M3, FP32 = torch.float8_e4m3fn, torch.float32
FORWARD = "x as e4m3 codes, then one fused product of codes; low-rank term and g inside"
FORWARD4 = FORWARD.replace("e4m3", "e2m1")
BACKWARD = "dz as e4m3 codes, one fused product of codes for dx"


def way_of(W: Any) -> str:
    """What a forward by such a product does, in words."""
    return FORWARD4 if columns_of(W) == NV else FORWARD


class Other(NamedTuple):
    """What becomes codes beside x: see kernels/fp8.py."""

    OTHER: str = ""
    other: Array | None = None
    factor: float = 1.0
    seed: Array | None = None
    threshold: int = 0


ONLY_X = Other()


def quantised(
    plan: Builder, x: Array, blocks: bool, by: Array | None = None, other: Other = ONLY_X, ends: Array | None = None
) -> tuple[Array, Array]:
    """(M, K), its columns times ``by`` (K,) -> e4m3 codes without gaps, and scales (1, M) or (blocks of columns, M). With
    ``ends``, of the tokens of each expert, each has its own ``by``."""
    M, K = x.shape
    out, scale = plan.temp((M, K), E4M3), plan.temp((cdiv(K, BLOCK) if blocks else 1, M))
    args = {"x": x, "out": out.words((M, K), (K, 1), torch.uint8), "scale": scale, "M": M, "K": K}
    args["PTX"] = has_ptx(plan.device.capability)
    if blocks:
        assert by is None and other is ONLY_X
        plan.launch(fp8_blocks_kernel, (cdiv(M, TOKENS), cdiv(K, BLOCK)), {**args, "BLOCK_M": TOKENS, "BLOCK": BLOCK})
    else:
        block_k = min(16384, max(128, power_of_two(K)))
        G = None if ends is None else ends.shape[0]
        args |= {"by": by, "offsets": ends, "G": G, "BLOCK_G": power_of_two(min(G or 1, 64)), "BLOCK_K": block_k}
        plan.launch(fp8_rows_kernel, (M,), args, other, num_warps=max(4, block_k // 1024))
    return out, scale


def columns_of(W: Any) -> int:
    """Of x that share a scale in a product with W; 0: all."""
    if isinstance(W.form, Lut4):
        return NV
    return 0 if W.form.scale != "block" else min(BLOCK, W.form.block[1])


def x_of(plan: Builder, x: Array, W: Any) -> tuple[Array, ...]:
    """x as codes for a product with W."""
    columns, (M, K) = columns_of(W), x.shape
    if columns == MX:
        return of_powers(plan, x)
    if columns != NV:
        return quantised(plan, x, columns > 0)
    out, scale, whole = plan.temp((M, K // 2), torch.uint8), plan.temp((M, cdiv(K, NV)), torch.uint8), plan.temp((M,))
    args = {"x": x, "out": out, "scale": scale, "whole": whole, "K": K, "groups": scale.shape[1]}
    args |= {"PTX": has_ptx(plan.device.capability), "BLOCK_K": min(4096, power_of_two(K))}
    plan.launch(nv_rows_kernel, (M,), args)
    return out, scale, whole


def of_powers(plan: Builder, x: Array, by: Array | None = None) -> tuple[Array, Array]:
    """(M, K) -> e4m3 codes, and the exponents (M, K / 32) of 32 columns each. ``by``: x is the codes of a W turned."""
    (M, K), groups, rows = x.shape, cdiv(x.shape[1], MX), TOKENS if by is None else BLOCK
    out, scale = plan.temp((M, K), E4M3), plan.temp((M, groups), torch.uint8)
    args = {"x": x, "by": by, "out": out.words((M, K), (K, 1), torch.uint8), "scale": scale, "M": M, "K": K, "groups": groups}
    args |= {"along": cdiv(M, MX), "PTX": has_ptx(plan.device.capability), "BLOCK_M": rows, "BLOCK": BLOCK}
    plan.launch(mx_rows_kernel, (cdiv(M, rows), cdiv(K, BLOCK)), args)
    return out, scale


def scaled_by(W: Any) -> tuple[int, int]:
    """Rows and columns of W that have one scale; no columns: a row has one."""
    return W.form.block if W.form.scale == "block" else (1 if W.form.scale == "row" else ALL, 0)


def tile_of_codes(plan: Builder, x: Array, W: Any, r: int, y: Array, pre: Array | None, few: int = LIMIT) -> GemmConfig | None:
    """The tile of a forward by such a product; None where W is decoded. ``few``: see fp8_config."""
    (N, K), on = W.shape, plan.device
    if columns_of(W) in (MX, NV):
        return _tile_of_scaled(plan, x)
    codes = W.codes.words((N, K), W.codes.stride, E4M3)
    tma = K % 16 == 0 and by_tma(codes, Operand(codes, None, trans=True), y, pre) == (True, True)
    ask = Ask(int(x.shape[0]), N, K, r, True, pre is not None, tma, on.capability, on.num_sms)
    return fp8_config(ask, *scaled_by(W), few)


def _tile_of_scaled(plan: Builder, x: Array) -> GemmConfig | None:
    return TILE_OF_MX if x.shape[0] > LIMIT and (plan.device.capability >= 100 or INTERPRETED) else None


class Low(NamedTuple):
    """The term of low rank: (M, r) (N, r)."""

    h: Array
    B: Array


def y_of_codes(
    plan: Builder,
    y: Array,
    x: tuple[Array, ...],
    W: Any,
    config: GemmConfig,
    low: Low | None = None,
    end: Epilogue = NO_EPILOGUE,
    pre: Array | None = None,
) -> None:
    """``x``: its codes and their scales. Without ``low`` x W^T alone."""
    x8, of_token, *whole = x
    if whole:
        (N, K), (scale, w_whole, *_) = W.shape, W.rest
        codes, scales = W.codes.words((N, K // 2), (K // 2, 1), torch.uint8), Scales(of_token, scale, groups_of(W), 1, NV // 2)
        _by_pointers(plan, y, x8, codes, config, scales, low, end, pre, (*whole, w_whole, W.form.scales == "e4m3/global"))
        return
    rows, columns = scaled_by(W)
    codes = W.codes.words(W.shape, W.codes.stride, E4M3)
    scales = Scales(of_token, W.rest[0], groups_of(W) if columns else 1, rows, columns)
    if config.tma:
        h, B = low or (None, None)
        right = Operand(codes, B, trans=True)
        gemm(plan, y, x8, h, right, end, pre_scale=pre, config=config, scales=scales)
        return
    _by_pointers(plan, y, x8, codes, config, scales, low, end, pre)


def _by_pointers(
    plan: Builder,
    out: Array,
    x: Array,
    w: Array,
    config: GemmConfig,
    scales: Scales,
    low: Low | None,
    end: Epilogue = NO_EPILOGUE,
    pre: Array | None = None,
    whole: tuple[Any, ...] = (None, None, False),
) -> None:
    """``whole``: scales of tokens and of all W beside the others, and whether that divides."""
    h, B = low or (None, None)
    given: dict[str, Any] = {"x": x, "w": w, "h": h, "b": B, "out": out, "pre_scale": pre, "EPILOGUE": end.kind}
    given |= {**named("stride_bn stride_br", B.stride if B else (None, None)), "M": x.shape[0], **named("N K", w.shape)}
    r = h.shape[1] if h else 0
    given |= {"R": r, "BLOCK_R": min(64, power_of_two(max(1, r))), **named("x_whole w_whole DIVIDES", whole)}
    plan.launch(fp8_gemm_kernel, "MN", given, end, config, scales)


def codes_config(plan: Builder, W: Any, r: int, dx: Array, masked: bool = False) -> GemmConfig | None:
    """The tile of such a product; None where W is decoded. ``masked``: the term of low rank is."""
    if columns_of(W) == MX:
        return None if masked else _tile_of_scaled(plan, dx)
    (M, K), form, on = dx.shape, W.form, plan.device
    N, (rows, columns) = W.shape[0], form.block if form.scale == "block" else (0, ALL)
    config = fp8_config(Ask(int(M), K, N, r, True, False, True, on.capability, on.num_sms), columns, rows)
    return None if config is None or not config.tma or N % 16 or K % 8 or rows % BLOCK else config


class Grouped(NamedTuple):
    """A grouped product of codes: x (M, K), and w with adjacent columns, as a forward has them. Each expert's W begins so many
    rows and columns behind that of the one before."""

    x: Array
    w: Array
    down: int
    along: int
    scales: Scales


def grouped_tile(plan: Builder, G: int, W: Any, r: int, out: Array, pre: Array | None, back: bool = False) -> GemmConfig | None:
    """Of ``out`` (M, N) of a forward, or (M, K) of a backward; None where W is decoded."""
    (rows, columns), (M, width), on = scaled_by(W), out.shape, plan.device
    N, K = W.shape[0] // G, W.shape[1]
    if back:  # what a step reads of the next W must not be summed up
        inner, fits, (rows, columns) = N, N % BLOCK == 0, (columns, rows if columns else 0)
    else:
        inner, fits = K, is_tma_compatible(W.codes)
    tma = fits and all(t is None or is_tma_compatible(t) for t in (out, pre))
    return grouped_fp8(Ask(int(M), width, inner, r, True, True, tma, on.capability, on.num_sms), G, rows, columns)


def grouped_forward(plan: Builder, x: Array, W: Any, G: int) -> Grouped:
    rows, columns = scaled_by(W)
    x8, of_token = quantised(plan, x, columns > 0)
    scales = Scales(of_token, W.rest[0], groups_of(W) if columns else 1, rows, columns)
    return Grouped(x8, W.codes.words(W.shape, W.codes.stride, E4M3), W.shape[0] // G, 0, scales)


def grouped_backward(plan: Builder, dz: Array, W: Any, ends: Array) -> Grouped:
    dz8, codes, scales = for_dx(plan, dz, W, ends)
    return Grouped(dz8, codes, 0, dz.shape[1], scales)


def turned(plan: Builder, codes: Array) -> Array:
    """(N, K) bytes -> (K, N) e4m3, for a W that keeps none."""
    N, K = codes.shape
    out = plan.temp((K, N), E4M3)
    given = {"codes": codes, "out": out.words((K, N), (N, 1), torch.uint8), **named("stride_n stride_k", codes.stride)}
    plan.launch(turn_kernel, (cdiv(N, TURNED), cdiv(K, TURNED)), given | {"N": N, "K": K, "BLOCK": TURNED})
    return out


def for_dx(plan: Builder, dz: Array, W: Any, ends: Array | None = None) -> tuple[Array, Array, Scales]:
    """dz as codes, those of W turned, and what their product is multiplied by. ``ends``: of experts."""
    (N, K), form, scale = W.shape, W.form, W.rest[0]
    codes, blocks = W.transposed or turned(plan, W.codes), form.scale == "block"
    by_row = form.scale == "row"
    dz8, of_token = quantised(plan, dz, blocks, scale if by_row else None, ends=ends if by_row else None)
    scales = Scales(of_token, scale if form.scale == "tensor" else None, 1, ALL)
    if blocks:
        rows, columns = form.block
        each = scale.words((cdiv(N, rows), cdiv(K, columns)), (cdiv(K, columns), 1), FP32)
        scales = Scales(of_token, stacked(plan, [each.T], FP32, 4), cdiv(N, rows), columns, rows)
    return dz8, codes, scales


def dz_of_codes(plan: Builder, dx: Array, dz: Array, W: Any, config: GemmConfig) -> None:
    """dz W alone."""
    if columns_of(W) == MX:
        return _dx_of_powers(plan, dx, dz, W, config)
    dz8, codes, scales = for_dx(plan, dz, W)
    gemm(plan, dx, dz8, None, Operand(codes, None, trans=True), config=config, scales=scales)


def _dx_of_powers(
    plan: Builder, dx: Array, dz: Array, W: Any, config: GemmConfig, low: Low | None = None, end: Epilogue = NO_EPILOGUE
) -> None:
    """W's codes turned have scales of 32 rows each, where its own are of 32 columns: most codes are the same."""
    dz8, of_token = of_powers(plan, dz)
    codes, scale = of_powers(plan, W.codes.words(W.shape, W.codes.stride, E4M3).T, W.rest[0])
    _by_pointers(plan, dx, dz8, codes, config, Scales(of_token, scale, scale.shape[1], 1, MX), low, end)


def dx_of_codes(plan: Builder, of: Any, dz: Array, dh: Array, config: GemmConfig) -> str:
    dx, la = of.dx, of.la
    end = Epilogue("accumulate", residual=dx) if of.accumulate else NO_EPILOGUE
    if columns_of(la.W) == MX:
        _dx_of_powers(plan, dx, dz, la.W, config, Low(dh, in_dtype(plan, la.A, dz.dtype).T), end)
        return BACKWARD
    dz8, codes, scales = for_dx(plan, dz, la.W)
    # by rows of A the largest ranks spill 16 bytes on sm_100
    A = stacked(plan, [la.A.T], dz.dtype) if plan.device.capability >= 100 else in_dtype(plan, la.A, dz.dtype).T
    right = Operand(codes, A, trans=True)
    gemm(plan, dx, dz8, dh, right, end, Masked(la.seed, of.dropout.p), config=config, scales=scales)
    return BACKWARD
