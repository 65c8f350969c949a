"""Forward of layers that read one x, step by step; see linear.py."""

from __future__ import annotations

from typing import Any

import torch

from fdora._records import Dropout
from fdora.triton.codes import Packed
from fdora.triton.copy import cast_together, copied, in_dtype, operand, stacked
from fdora.triton.dequantize import weight_in, weight_of
from fdora.triton.dropout import drawn_inside, drop
from fdora.triton.dropped import WORDS, dropped_forward, tile_of_dropped
from fdora.triton.fp8 import FORWARD, FORWARD4, Low, columns_of, tile_of_codes, way_of, x_of, y_of_codes
from fdora.triton.gemm import Epilogue, Operand, gemm
from fdora.triton.kernels.product import epilogue_kernel
from fdora.triton.masked import low_rank
from fdora.triton.norm import norm
from fdora.triton.product import scaled_product
from fdora.triton.runtime import Array, Builder, Scalar, named
from fdora.triton.small import LIMIT, Out, is_few, reads, small_forward, why_many
from fdora.triton.small_norm import fits, small_norm_forward
from fdora.triton.tiles.fp8 import FEW

TILE = {"BLOCK_M": 4, "BLOCK_N": 512}


def forward(
    plan: Builder,
    x: Array,
    layers: list[Any],
    scalars: list[Scalar],
    out: list[Out],
    h: Array | None,
    dropout: Dropout,
    same_s: bool,
    residual: Array | None = None,
    fp8: bool = False,
) -> None:
    """All layers on x: also the two halves of an MLP (mlp.py). One layer may have a residual, (M, N) like its y, to add.
    ``fp8``: every W is of e4m3 codes, or NVFP4, which those with an adapter multiply by codes of x (fp8.py)."""
    half = x.dtype != torch.float32
    cast_together(plan, layers)
    both = [*zip(layers, out, strict=True)]
    codes = [
        tile_of_codes(plan, x, la.W, la.A.shape[0], o.y, o.pre_scale, FEW) if fp8 and la.A is not None else None
        for la, o in both
    ]
    few = [half and tile is None and is_few(plan, x, la, True) for la, tile in zip(layers, codes, strict=True)]
    adapted = [la for la in layers if la.A is not None]
    inside = [each.c is not None and la.seed is None and _norm_fits(plan, x, la) for la, each in both]
    # Another s for each would have to be folded into A, and round it; few tokens are cheap to read.
    at_once = len(adapted) > 1 and same_s and not any(few) and not any(inside) and all(la.seed is None for la in adapted)
    if at_once:  # one product reads x once
        assert h is not None
        plan.product(h, x, stacked(plan, [la.A for la in adapted], x.dtype).T, scalars[0])
    how, rounded = "nothing", dict[int, tuple[Array, ...]]()
    for la, s, each, tile, small, with_norm in zip(layers, scalars, out, codes, few, inside, strict=True):
        if each.c is not None:
            la = la._replace(c=each.c)
        if tile is not None:
            if not at_once:
                low_rank(plan, x, in_dtype(plan, la.A, x.dtype), s, la.seed, dropout.p, each.h)
            columns = columns_of(la.W)
            if columns not in rounded:
                rounded[columns] = x_of(plan, x, la.W)
            low, end = Low(each.h, in_dtype(plan, la.B, x.dtype)), Epilogue("scale", la.m, la.c, la.bias)
            y_of_codes(plan, each.y, rounded[columns], la.W, tile, low, end, each.pre_scale)
            how = way_of(la.W)
        elif la.A is None:
            _frozen_forward(plan, x, la, each.y)
        elif with_norm or (small and la.seed is None):  # it forms h in passing, faster than it could read one
            if residual is not None:
                copied(plan, residual, each.y)
            onto = residual is not None
            if with_norm:
                small_norm_forward(plan, x, la, s, each, accumulate=onto)
                continue
            if not (isinstance(la.W, Packed) and reads(la.W)):
                la = la._replace(W=weight_of(plan, la, s, x.dtype, each.c))
            elif each.c is not None:
                norm(plan, la.W, la.A, la.B, s, each.c)
            small_forward(plan, x, la, s, each, accumulate=onto)
        else:
            how = _forward(plan, x, la, s, each, dropout, at_once, residual)
    packed = [la for la, tile in zip(layers, codes, strict=True) if isinstance(la.W, Packed) and tile is None]
    plan.path = _path(x, how, any(few), any(inside), packed, any(each.c is not None for each in out))


def _path(x: Array, how: str, few: bool, inside: bool, packed: list[Any], norms: bool) -> str:
    """``packed``: layers whose codes are decoded; ``norms``: whether some are formed beside that."""
    if inside:
        path = "few tokens: one pass over W; its norm out of the same pass"
    elif x.dtype == torch.float32:
        path = "products by cuBLAS, then g in one pass; float32 obeys torch.set_float32_matmul_precision"
    elif few:
        path = f"few tokens: one pass over W; up to {LIMIT} tokens reading it is what a call costs"
    else:
        path = how if how in (FORWARD, FORWARD4) else f"x A^T, then the product; {how}; {why_many(x)}"
    if few and packed and all(la.A is not None and la.seed is None and reads(la.W) for la in packed):
        path += "; codes of W are decoded where they are multiplied"
    elif packed:
        path += "; W is decoded first" + (", its norm with it" if norms else "")
    return path


def _norm_fits(plan: Builder, x: Array, la: Any) -> bool:
    return la.A is not None and not isinstance(la.W, Packed) and fits(plan.device, x.shape[0], x.dtype, la.W, la.A, la.B)


def _forward(
    plan: Builder, x: Array, la: Any, s: Scalar, out: Out, dropout: Dropout, h_is_there: bool, residual: Array | None
) -> str:
    t, (y, h, pre, c) = x.dtype, out
    assert h is not None
    W, peft = weight_of(plan, la, s, t, c), la.seed is not None and dropout.mode == "peft"
    tile = tile_of_dropped(plan, x, W, W.shape[0], h.shape[1], dropout.p, t) if peft else None
    copy = peft and not (tile is not None and drawn_inside(x, la.seed, h.shape[1]))
    xd = drop(plan, x, la.seed, dropout.p) if copy else None
    if not h_is_there:
        low_rank(plan, x, in_dtype(plan, la.A, t), s, la.seed, dropout.p, h, xd)
    B = in_dtype(plan, la.B, t)
    if t == torch.float32:
        v = pre if pre is not None and not peft else y
        plan.product(v, x, W.T)
        plan.product(v, h, B.T, accumulate=True)
        if xd is not None:
            pre = plan.temp(y.shape, t) if pre is None else pre
            plan.product(pre, xd, W.T)
            plan.product(pre, h, B.T, accumulate=True)
        epilogue_of(plan, v, y, Epilogue("residual" if peft else "scale", la.m, la.c, la.bias, pre if peft else residual))
        return "products by cuBLAS"
    if tile is not None:
        dropped_forward(plan, x, xd, la, W, h, B, out, dropout.p, tile)
        return WORDS
    if xd is not None:
        pre = plan.temp(y.shape, t) if pre is None else pre
        gemm(plan, pre, xd, h, Operand(W, B, trans=True))
        gemm(plan, y, x, h, Operand(W, B, trans=True), Epilogue("residual", la.m, la.c, la.bias, pre))
        return "two fused products"
    if residual is not None:
        gemm(plan, y, x, h, Operand(W, B, trans=True), Epilogue("scale", la.m, la.c, la.bias, residual), pre_scale=pre)
        return "one fused product"
    return scaled_product(plan, y, x, h, W, B, Epilogue("scale", la.m, la.c, la.bias), pre)


def _frozen_forward(plan: Builder, x: Array, la: Any, y: Array) -> None:
    W = weight_in(plan, la.W, x.dtype)
    wide = y if la.bias is None or y.dtype == torch.float32 else plan.temp(y.shape)
    plan.product(wide, x, operand(plan, W).T)
    if la.bias is not None:
        epilogue_of(plan, wide, y, Epilogue("none", bias=la.bias))


def epilogue_of(plan: Builder, v: Array, y: Array, epilogue: Epilogue) -> None:
    """g and bias on what is float32."""
    given = {"v": v, "out": y, "EPILOGUE": epilogue.kind, **named("M N", y.shape)}
    plan.launch(epilogue_kernel, "M N", given, epilogue, TILE)


def columns_of_h(h: Array | None, layers: list[Any]) -> list[Array | None]:
    """Each layer's columns of s x A^T of all layers side by side."""
    parts: list[Array | None] = []
    at = 0
    for la in layers:
        r = 0 if la.A is None else la.A.shape[0]
        parts.append(None if la.A is None or h is None else h.columns(at, at + r))
        at += r
    return parts
