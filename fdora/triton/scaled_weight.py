"""Backward of a layer whose W takes g, for many tokens: no dz.

    dx = dy (g W) + dh A      dh = s dy (g B)      dA = dh^T x      dB = g (dy^T h)

dy itself is multiplied, and nothing of the size of y is written. g B is small. The sums over tokens read dy and what is kept
of y as ever (scale.py).

A W of codes is decoded for dx anyway, and takes g there: g value(code) scale in float32, rounded once, where a dense layer
rounds dz = g dy and reads a W that is rounded. Rows whose g is 0 left nothing in y: one more launch asks whether there are any,
and forms their products from the codes.

Of a dense W a scaled copy is made: N K elements read and written in the place of M N written. So from M = 2 K on it moves less
memory, and M N - N K elements fewer are there at once. Roundings are as many: of g W in the place of g dy.

Of a large W only some columns are scaled at a time: each product writes those columns of dx, and reads dy again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fdora.triton import scale
from fdora.triton.codes import Packed
from fdora.triton.copy import by_g, in_dtype
from fdora.triton.dequantize import G, decode, redo_lost, room
from fdora.triton.dropout import drop
from fdora.triton.factors import at_once, factor_gradients
from fdora.triton.masked import gradient_of_A
from fdora.triton.runtime import Array, Builder, Device, cdiv
from fdora.triton.scale import Given
from fdora.triton.small import is_small
from fdora.triton.tiles.waves import gpu_of

COLUMNS, AT_ONCE = 512, 2**28  # parts of W are multiples of so many columns, and no more bytes than that where they can
LAUNCHES = 8.0  # us: what scales W, B and dB, by kernels of their own


def takes_g(on: Device, of: Given) -> bool:
    """Whether W takes g in the place of dy, which is no dz. Columns of codes that a bias drowns in y want W itself."""
    la, x = of.la, of.x
    half = x.dtype != torch.float32
    if of.scaled or (half and is_small(x.shape[0])) or (la.seed is not None and of.dropout.mode == "peft"):
        return False
    if isinstance(la.W, Packed):
        return la.bias is None or of.pre_scale
    N, K = la.W.shape
    return half and la.W.stride[1] == 1 and moves_less(x.shape[0], N, K, on)


def moves_less(M: int, N: int, K: int, on: Device) -> bool:
    """Whether a scaled copy of a dense W saves more bytes than its launches cost."""
    saved = 2 * N * (M - 2 * K)
    return saved > LAUNCHES * gpu_of(on.capability, on.num_sms).bytes


def scaled_backward(plan: Builder, of: Given, dx_of: Callable[[Array, Array, Array, Array], str]) -> str:
    """``dx_of`` takes columns of dx, and those of g W and of A, and dh, and says how."""
    dy, x, la, s, h = of[:5]
    grads, p, dx = of.grads, of.dropout.p, of.dx
    t, g, (r, K), coded = x.dtype, G(la.m, la.c), la.A.shape, isinstance(la.W, Packed)
    long = scale.long_strip_of(plan, dy, r)
    both = not long and at_once(plan.device, of)
    config = scale.config_for(plan, dy, r, grads.B is not None and not both, long)
    sums = scale.Sums(dm=grads.m, dc=grads.c, dbias=grads.bias, dB=grads.B if config.BLOCK_R else None)
    if any(each is not None for each in sums):
        scale.scale_backward(plan, of._replace(la=la._replace(W=None)) if coded else of, sums, config)
    if coded:
        redo(plan, of)
    dh, gB = plan.temp((x.shape[0], r), t), plan.temp(la.B.shape, t)
    by_g(plan, la.B, *g, gB)
    plan.product(dh, dy, gB, s)
    A, how = in_dtype(plan, la.A, t), ""
    width = columns_of(la.W.shape, t.itemsize) if la.seed is None else K  # a mask counts the columns of all of dx
    W = room(plan, (la.W.shape[0], width), t)
    assert dx is not None
    for i in range(0, K, max(1, width)):
        j = min(K, i + width)
        part = W.columns(0, j - i)
        if coded:
            decode(plan, la.W, part, g, i)
        else:
            by_g(plan, la.W.columns(i, j), *g, part)
        how = dx_of(dx.columns(i, j), part, A.columns(i, j), dh)
    if both:
        factor_gradients(plan, drop(plan, x, la.seed, p), dh, grads.A, dy, h, grads.B, g=g)
        return how
    if grads.A is not None:
        gradient_of_A(plan, grads.A, dh, x, la.seed, p)
    if grads.B is not None and sums.dB is None:
        wide = grads.B if grads.B.dtype == torch.float32 else plan.temp(grads.B.shape)
        plan.product(wide, dy.T, h)
        by_g(plan, wide, *g, grads.B)
    return how


def redo(plan: Builder, of: Given) -> None:
    """What the columns of a W of codes lost in y, where something is asked of them."""
    la, grads = of.la, of.grads
    if not of.pre_scale:
        redo_lost(plan, la.W, of.dy, of.x, of.h, la.B, G(la.m, la.c), grads.m, grads.c)


def columns_of(shape: tuple[int, int], itemsize: int) -> int:
    """How many are scaled at a time: all, or equal parts."""
    N, K = shape
    parts = cdiv(N * K * itemsize, AT_ONCE)
    return K if parts <= 1 else min(K, cdiv(cdiv(K, parts), COLUMNS) * COLUMNS)
