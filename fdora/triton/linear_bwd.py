"""Backward of layers that read one x, step by step; see linear.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdora._records import WIDTH, Dropout, Grads, Needs, Operands
from fdora.triton import scale
from fdora.triton.codes import Packed
from fdora.triton.copy import gradient, in_dtype, operand
from fdora.triton.dequantize import G, redo_lost, weight_in
from fdora.triton.dropout import drop
from fdora.triton.factors import at_once, factor_gradients
from fdora.triton.gemm import NO_EPILOGUE, Epilogue, Masked, Operand, gemm
from fdora.triton.product import summed_product
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.plan import Array, Scalar
from fdora.triton.scaled_weight import Given, scaled_backward, takes_g
from fdora.triton.small import LIMIT, Back, is_small, narrow, small_backward
from fdora.triton.small_quant import reads, small_backward_of_codes

NARROW = "one pass over W"


def _is_few(plan: Builder, dy: Array, la: Any) -> bool:
    if isinstance(la.W, Packed):
        return is_small(dy.shape[0])
    return narrow(plan, dy, la.W, la.A.shape[0])


def needs_in(flat: Sequence[bool]) -> list[Needs]:
    """Needs one behind the other, as those of each layer again."""
    return [Needs(*flat[i : i + len(Needs._fields)]) for i in range(0, len(flat), len(Needs._fields))]


def _forms(la: Any, needs: Needs) -> list[Any]:
    """Shape and dtype of each gradient of a layer that is asked for."""
    like = ((la.A, None), (la.B, None), (la.m, None), (la.m, torch.float32), (la.bias, torch.float32))
    return [(t.shape, dtype or t.dtype) if need else None for (t, dtype), need in zip(like, needs, strict=True)]


def result_grads(plan: Builder, layers: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """The results of each layer that are asked for, as Grads."""
    found = []
    for i, (la, need) in enumerate(zip(layers, needs_in(needs), strict=True)):
        forms = zip(Grads._fields, _forms(la, need), strict=True)
        found.append(Grads._make(form and plan.result(f"d{name}{i}", *form) for name, form in forms))
    return found


def forms_of_grads(x: Any, operands: Sequence[Any], need_x: bool, needs: Sequence[bool]) -> list[Any]:
    """Of what a backward returns: dx and the gradients of each layer that are asked for."""
    forms: list[Any] = [(x.shape, x.dtype) if need_x else None]
    for i, need in enumerate(needs_in(needs)):
        forms += _forms(Operands(*operands[WIDTH * i : WIDTH * (i + 1)]), need)
    return forms


def backward(
    plan: Builder,
    dys: Sequence[Array | None],
    x: Array,
    layers: list[Any],
    scalars: list[Scalar],
    hs: list[Array | None],
    kept: Sequence[Array | None],
    pre_scale: Sequence[bool],
    dropout: Dropout,
    dx: Array | None,
    grads: Sequence[Any],
) -> None:
    """Into dx, in place from the second layer on, and into grads."""
    first, how = True, "products by cuBLAS"
    for i, (dy, la) in enumerate(zip(dys, layers, strict=True)):
        if dy is None:
            continue
        if la.A is None:
            _frozen_backward(plan, dy, la, dx, not first, grads[i].bias)
        else:
            given = Given(dy, x, la, scalars[i], hs[i], kept[i], pre_scale[i], grads[i])
            how = _backward(plan, given, dropout, dx, not first)
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
        many = f"more than {LIMIT} tokens" if x.shape[0] > LIMIT else "predicted faster than one pass over W"
        product = f"{how}; {many}"
    packed = [la for la in layers if isinstance(la.W, Packed)]
    no_dz = dx is not None and all(
        la.A is None or takes_g(plan.device, la, x, dropout, pre) for la, pre in zip(layers, pre_scale, strict=True)
    )
    plan.path = f"one pass for {'' if no_dz else 'dz and '}the sums over tokens, then {product}"
    if dx is not None and packed:
        few = x.dtype != torch.float32 and is_small(x.shape[0]) and all(la.seed is None and reads(la.W) for la in packed)
        decoded = "g W" if no_dz else "W"
        plan.path += "; codes of W are decoded where they are multiplied" if few else f"; {decoded} is decoded first"
    elif no_dz and any(la.A is not None for la in layers):
        plan.path += "; W is scaled by g, and dy is not"


def _backward(plan: Builder, given: Given, dropout: Dropout, dx: Array | None, accumulate: bool) -> str:
    """Returns how dx is formed, in words."""
    dy, x, la, s, h, kept, pre_scale, grads = given
    t, how = x.dtype, "no dx is asked for"
    half, peft = t != torch.float32, la.seed is not None and dropout.mode == "peft"
    r, few = la.A.shape[0], half and _is_few(plan, dy, la)
    if dx is not None and takes_g(plan.device, la, x, dropout, pre_scale):

        def dx_of(out: Array, W: Array, A: Array, dh: Array) -> str:
            return _dx(plan, out, accumulate, dy, dy, None, W, A, dh, la.seed, dropout.p)

        return scaled_backward(plan, given, dropout.p, dx, dx_of)
    both = grads.A is not None and grads.B is not None and not few and at_once(x, dy, r, plan.device.capability)
    config = scale.config_for(plan, dy, r, grads.B is not None and not both)
    fused_B = grads.B if config.BLOCK_R else None
    need_dz = dx is not None or grads.A is not None or (grads.B is not None and fused_B is None)
    dz = plan.temp(dy.shape, t) if need_dz else None
    less = plan.temp(dy.shape, t) if peft and dx is not None else None
    sums = scale.Sums(dz, less, grads.m, grads.c, grads.bias, fused_B)
    small = dx is not None and la.seed is None and few
    lost = isinstance(la.W, Packed) and not pre_scale and (grads.m is not None or grads.c is not None)
    dense = la
    if isinstance(la.W, Packed):
        whole = dx is not None and not small
        dense = la._replace(W=weight_in(plan, la.W, t) if whole else None)
    scale.scale_backward(plan, dy, kept, pre_scale, x, dense, h, sums, config)
    if lost and dense.W is None:
        assert h is not None
        redo_lost(plan, la.W, dy, x, h, la.B, G(la.m, la.c), grads.m, grads.c)
    if dense.W is not None:
        la = dense
    if dz is None:
        return how
    if dx is not None and small:
        how = NARROW
        if isinstance(la.W, Packed) and reads(la.W):
            small_backward_of_codes(plan, dz, la, s, Back(dx, grads.A, x), accumulate=accumulate)
        else:
            la = la._replace(W=weight_in(plan, la.W, t))
            small_backward(plan, dz, la, s, Back(dx, grads.A, x), accumulate=accumulate)
    elif dx is not None or grads.A is not None:
        dh = plan.temp((x.shape[0], la.A.shape[0]), t)
        plan.product(dh, dz, in_dtype(plan, la.B, t), s)
        if dx is not None:
            W, A = weight_in(plan, la.W, t), in_dtype(plan, la.A, t)
            how = _dx(plan, dx, accumulate, dy, dz, less, W, A, dh, la.seed, dropout.p)
        if grads.A is not None:
            xd = drop(plan, x, la.seed, dropout.p)
            if both:
                assert h is not None
                factor_gradients(plan, xd, dh, grads.A, dz, h, grads.B)
                return how
            gradient(plan, grads.A, dh.T, xd)
    if grads.B is not None and fused_B is None:
        assert h is not None
        gradient(plan, grads.B, dz.T, h)
    return how


def _dx(
    plan: Builder,
    dx: Array,
    accumulate: bool,
    dy: Array,
    dz: Array,
    less: Array | None,
    W: Array,
    A: Array,
    dh: Array,
    seed: Array | None,
    p: float,
) -> str:
    if dx.dtype != torch.float32 and seed is None:
        return summed_product(plan, dx, dz, dh, W, A, accumulate)
    if dx.dtype != torch.float32:
        epilogue = Epilogue("accumulate", residual=dx) if accumulate else NO_EPILOGUE
        gemm(plan, dx, dz if less is None else dy, dh, Operand(W, A, trans=False), epilogue, Masked(seed, p, less))
        return "one fused product for dx"
    plan.product(dx, dz if less is None else dy, W, accumulate=accumulate)
    if seed is None:
        plan.product(dx, dh, A, accumulate=True)
        return "products by cuBLAS"
    part = plan.temp(dx.shape, dx.dtype)
    if less is not None:
        plan.product(part, less, W)
    plan.product(part, dh, A, accumulate=less is not None)
    drop(plan, part, seed, p, accumulate_into=dx)
    return "products by cuBLAS"


def _frozen_backward(plan: Builder, dy: Array, la: Any, dx: Array | None, accumulate: bool, dbias: Array | None) -> None:
    if dx is not None:
        plan.product(dx, dy, operand(plan, weight_in(plan, la.W, dy.dtype)), accumulate=accumulate)
    if dbias is not None:
        sums, config = scale.Sums(dbias=dbias), scale.config_for(plan, dy, 1)
        scale.scale_backward(plan, dy, None, True, None, la._replace(W=None), None, sums, config)
