"""PEFT's dropout with one product of W in half precision and one of e4m3 codes, of the dropped part of x alone.

With L = x where D(x) is 0, and 0 elsewhere, D(x) = (x - L) / (1 - p), so that

    v = D(x) W^T + h B^T = (acc - p R) / (1 - p)      acc = x W^T + h B^T,   R = L W^T / p + h B^T
    y = acc + (g - 1) v + bias                        h = s D(x) A^T
    dx = z W + D'(dh A) - (dropped of (z - dy) W)     z = (1 + (g - 1) / (1 - p)) dy,   dh = s g dy B

R and the last term of dx are the products of codes. The operand of one and the result of the other have p of the energy, and
both meet the factor g - 1, so that three bits of fraction are enough: y's error is 1.03, 1.13 and 1.8 times that of half
precision at g spread by 0.05, 0.1 and 0.3; dx loses less. W becomes codes in each call, with a scale for each row: 3 bytes a
weight, and 5 in backward, which turns them. A second product in half precision would take 2 M flops a weight. So the tokens
and both sizes of W must be large.
"""

from __future__ import annotations

from typing import Any

import torch

from fdora.triton.codes import Packed
from fdora.triton.dropout import threshold
from fdora.triton.fp8 import ALL, Other, quantised, turned
from fdora.triton.gemm import NO_EPILOGUE, UNMASKED, Epilogue, Masked, Operand, Scales, gemm
from fdora.triton.runtime import Array, Builder, is_tma_compatible
from fdora.triton.small import Out
from fdora.triton.tiles.configs import GemmConfig
from fdora.triton.tiles.fp8 import fp8_config
from fdora.triton.tiles.product import Ask

LEAST, LEAST_P = 2048, 1e-3  # tokens, rows and columns of W; R is in units of 1 / p
DTYPE = torch.bfloat16  # float16 has three bits more, which these products have not
TILE = GemmConfig(True, 128, 128, 64, 8, True, True, 8, 5)  # of y's product: by 4 warps, or 128 x 256, its end spills
WORDS = "a fused product, and one of e4m3 codes for what is dropped"


def tile_of_dropped(
    plan: Builder, left: Array, W: Array | Packed, columns: int, r: int, p: float, dtype: torch.dtype
) -> GemmConfig | None:
    """Of the product of codes: left, (M, K) or (M, N), by W or W^T, with a result of so many columns. None where both products
    are in half precision."""
    on, (M, inner) = plan.device, left.shape
    if not 90 <= on.capability < 120 or min(int(M), inner, columns) < LEAST or p < LEAST_P or dtype != DTYPE:
        return None
    if inner % 16 or columns % 16 or not is_tma_compatible(left) or not (isinstance(W, Packed) or is_tma_compatible(W)):
        return None
    # one tile for all numbers of tokens, so that a length compiles nothing of its own
    return fp8_config(Ask(2 * LEAST, columns, inner, r, True, True, True, on.capability, on.num_sms), ALL, 0)


def dropped_forward(
    plan: Builder, x: Array, xd: Array | None, la: Any, W: Array, h: Array, B: Array, out: Out, p: float, config: GemmConfig
) -> None:
    """y and, where it is kept, v; xd is D(x), without which the mask is drawn."""
    y, _, pre, _ = out
    R = pre or plan.temp(y.shape, y.dtype)
    masked = Other("masked", None, 1 / p, la.seed, threshold(p)) if xd is None else Other("dropped", xd, 1 / p)
    x8, right, of_codes = codes_of_dropped(plan, x, masked, W)
    gemm(plan, R, x8, h, right._replace(b=B), config=config, scales=of_codes)
    epilogue = Epilogue("dropped", la.m, la.c, la.bias, R)
    gemm(plan, y, x, h, Operand(W, B, trans=True), epilogue, Masked(p=p), pre_scale=pre, config=TILE)


def dropped_dx(plan: Builder, of: Any, z: Array, dh: Array, W: Array, A: Array, config: GemmConfig) -> None:
    """Into dx, or onto it."""
    masked, onto = Masked(of.la.seed, of.dropout.p), Epilogue("accumulate", residual=of.dx)
    product_of_change(plan, of.dx, z, of.dy, W, config, onto if of.accumulate else NO_EPILOGUE, masked)
    gemm(plan, of.dx, z, dh, Operand(W, A, trans=False), onto, masked)


def codes_of_dropped(plan: Builder, x: Array, dropped: Other, W: Array) -> tuple[Array, Operand, Scales]:
    """Of L W^T, times the factor of ``dropped``: what is multiplied."""
    codes, of_row = quantised(plan, W, False)
    x8, of_token = quantised(plan, x, False, other=dropped)
    return x8, Operand(codes, None, trans=True), Scales(of_token, of_row)


def product_of_change(
    plan: Builder,
    out: Array,
    z: Array,
    dy: Array,
    W: Array,
    config: GemmConfig,
    end: Epilogue = NO_EPILOGUE,
    masked: Masked = UNMASKED,
) -> None:
    """(dy - z) W, of codes; ``masked``: where D(x) is 0 alone."""
    codes, of_row = quantised(plan, W, False)
    z8, of_token = quantised(plan, z, False, of_row, Other("minus", dy, -1.0))
    turn = Operand(turned(plan, codes.words(codes.shape, codes.stride, torch.uint8)), None, trans=True)
    gemm(plan, out, z8, None, turn, end, masked, config=config, scales=Scales(of_token, None, 1, ALL))
