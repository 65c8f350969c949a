"""Backward of layers that read one x, step by step; see linear.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdora._records import WIDTH, Grads, Needs
from fdora.triton import scale
from fdora.triton.codes import Packed
from fdora.triton.copy import cast_together, gradient, in_dtype, operand
from fdora.triton.dequantize import weight_in
from fdora.triton.dropout import drop
from fdora.triton.dropped import WORDS, dropped_dx, tile_of_dropped
from fdora.triton.factors import at_once, factor_gradients
from fdora.triton.fp8 import BACKWARD, codes_config, dx_of_codes
from fdora.triton.gemm import NO_EPILOGUE, Epilogue, Masked, Operand, gemm
from fdora.triton.masked import gradient_of_A
from fdora.triton.product import summed_product
from fdora.triton.runtime import Array, Builder
from fdora.triton.scale import Given
from fdora.triton.scaled_weight import redo, scaled_backward, takes_g
from fdora.triton.small import LIMIT, Back, is_few, is_small, reads, small_backward, why_many

NARROW = "one pass over W"


def by_layer(kind: Any, flat: Sequence[Any]) -> list[Any]:
    """Needs or Grads one behind the other, as those of each layer again."""
    count = len(kind._fields)
    return [kind._make(flat[i : i + count]) for i in range(0, len(flat), count)]


def forms_of_grads(x: Any, operands: Sequence[Any], need_x: bool, needs: Sequence[bool]) -> dict[str, Any]:
    """Of what a backward returns: dx and the gradients of each layer."""
    forms: dict[str, Any] = {"dx": (x.shape, x.dtype) if need_x else None}
    for i, need in enumerate(by_layer(Needs, needs)):
        _, A, B, m, _, bias, _ = operands[WIDTH * i : WIDTH * (i + 1)]
        for name, t, wanted in zip(Grads._fields, (A, B, m, m, bias), need, strict=True):
            dtype = torch.float32 if name in ("c", "bias") else None
            forms[f"d{name}{i}"] = (t.shape, dtype or t.dtype) if wanted else None
    return forms


def backward(plan: Builder, parts: Sequence[Given], dx: Array | None) -> None:
    """Of layers on one x: into dx, in place from the second layer on, and into their gradients. A dy may be None."""
    first, how, x = True, "products by cuBLAS", parts[0].x
    cast_together(plan, [of.la for of in parts if of.dy is not None])
    for of in parts:
        if of.dy is not None:
            of = of._replace(dx=dx, accumulate=not first)
            how = _frozen_backward(plan, of, how) if of.la.A is None else _backward(plan, of)
            first = False
    if dx is not None and first:
        plan.zero(dx)
    if x.dtype == torch.float32:
        product = "products by cuBLAS; float32 obeys torch.set_float32_matmul_precision"
    elif dx is None:
        product = "products by cuBLAS; no dx is asked for"
    elif how == NARROW:
        product = f"one pass over W; at most {LIMIT} tokens"
    else:
        product = f"{how}; {why_many(x)}"
    layers = [of.la for of in parts]
    packed = [la for la in layers if isinstance(la.W, Packed)]
    no_dz = dx is not None and how != BACKWARD and all(of.la.A is None or takes_g(plan.device, of) for of in parts)
    plan.path = f"one pass for {'' if no_dz else 'dz and '}the sums over tokens, then {product}"
    if dx is not None and packed:
        few = x.dtype != torch.float32 and is_small(x.shape[0]) and all(la.seed is None and reads(la.W) for la in packed)
        decoded = "g W" if no_dz else "W"
        if how != BACKWARD:
            plan.path += "; codes of W are decoded where they are multiplied" if few else f"; {decoded} is decoded first"
    elif no_dz and any(la.A is not None for la in layers):
        plan.path += "; W is scaled by g, and dy is not"


def _backward(plan: Builder, of: Given) -> str:
    """Returns how dx is formed, in words."""
    dy, x, la, s, h, *_, grads, dropout, dx, accumulate, _, scaled = of
    t, r, how, coded = x.dtype, la.A.shape[0], "no dx is asked for", isinstance(la.W, Packed)
    peft, few = la.seed is not None and dropout.mode == "peft", t != torch.float32 and is_few(plan, dy, la, False)
    codes = codes_config(plan, la.W, r, dx, la.seed is not None) if of.fp8 and dx is not None else None
    if dx is not None and codes is None and takes_g(plan.device, of):
        return scaled_backward(plan, of, lambda out, W, A, dh: _dx(plan, of._replace(dx=out), dy, None, W, A, dh))
    both = not few and at_once(plan.device, of)
    config = scale.config_for(plan, dy, r, grads.B is not None and not both)
    fused_B = grads.B if config.BLOCK_R and not scaled else None
    need_dz = dx is not None or grads.A is not None or (grads.B is not None and fused_B is None)
    dz = dy if scaled else plan.temp(dy.shape, t) if need_dz else None
    beside = plan.temp(dy.shape, t) if peft and dx is not None else None
    tile = None if beside is None else tile_of_dropped(plan, beside, la.W, la.W.shape[1], r, dropout.p, t)
    small = dx is not None and la.seed is None and few
    dense = la
    if coded:
        dense = la._replace(W=weight_in(plan, la.W, t) if dx is not None and not small and codes is None else None)
    of_dy = (0.0, 1.0) if tile is None else (1.0, 1 / (1 - dropout.p))
    sums = scale.Sums(dz, beside, grads.m, grads.c, grads.bias, fused_B, *of_dy)
    if not scaled:
        scale.scale_backward(plan, of._replace(la=dense), sums, config)
    if dense.W is None:
        redo(plan, of)
    else:
        la = dense
    if dz is None:
        return how
    if dx is not None and small:
        how = NARROW
        if not (coded and reads(la.W)):
            la = la._replace(W=weight_in(plan, la.W, t))
        small_backward(plan, dz, la, s, Back(dx, grads.A, x), accumulate=accumulate)
    elif dx is not None or grads.A is not None:
        dh = plan.temp((x.shape[0], r), t)
        plan.product(dh, dz, in_dtype(plan, la.B, t), s)
        if dx is not None and codes is not None:
            how = dx_of_codes(plan, of, dz, dh, codes)
        elif dx is not None:
            W, A = weight_in(plan, la.W, t), in_dtype(plan, la.A, t)
            if tile is not None and beside is not None:
                dropped_dx(plan, of, beside, dh, W, A, tile)
                how = WORDS
            else:
                how = _dx(plan, of, dz, beside, W, A, dh)
        if grads.A is not None and both:
            factor_gradients(plan, drop(plan, x, la.seed, dropout.p), dh, grads.A, dz, h, grads.B)
            return how
        if grads.A is not None:
            gradient_of_A(plan, grads.A, dh, x, la.seed, dropout.p)
    if grads.B is not None and fused_B is None:
        gradient(plan, grads.B, dz.T, h)
    return how


def _dx(plan: Builder, of: Given, dz: Array, less: Array | None, W: Array, A: Array, dh: Array) -> str:
    dx, accumulate, seed, p = of.dx, of.accumulate, of.la.seed, of.dropout.p
    assert dx is not None
    if dx.dtype != torch.float32 and seed is None:
        return summed_product(plan, dx, dz, dh, W, A, accumulate)
    if dx.dtype != torch.float32:
        epilogue = Epilogue("accumulate", residual=dx) if accumulate else NO_EPILOGUE
        gemm(plan, dx, dz if less is None else of.dy, dh, Operand(W, A, trans=False), epilogue, Masked(seed, p, less))
        return "one fused product for dx"
    plan.product(dx, dz if less is None else of.dy, W, accumulate=accumulate)
    if seed is None:
        plan.product(dx, dh, A, accumulate=True)
        return "products by cuBLAS"
    part = plan.temp(dx.shape, dx.dtype)
    if less is not None:
        plan.product(part, less, W)
    plan.product(part, dh, A, accumulate=less is not None)
    drop(plan, part, seed, p, accumulate_into=dx)
    return "products by cuBLAS"


def _frozen_backward(plan: Builder, of: Given, how: str) -> str:
    if of.dx is not None:
        plan.product(of.dx, of.dy, operand(plan, weight_in(plan, of.la.W, of.dy.dtype)), accumulate=of.accumulate)
    if of.grads.bias is not None:
        given = of._replace(x=None, la=of.la._replace(W=None), h=None, saved=None, pre_scale=True)
        scale.scale_backward(plan, given, scale.Sums(dbias=of.grads.bias), scale.config_for(plan, of.dy, 1))
    return how
