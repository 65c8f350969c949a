"""Backward of a layer whose W is codes, for many tokens: no dz.

    dx = dy (g W) + dh A      dh = s dy (g B)      dA = dh^T x      dB = g (dy^T h)

A dense W is decoded for dx anyway, and takes g there: g value(code) scale in float32, rounded once, where a dense layer rounds
dz = g dy and reads a W that is rounded. So dy itself is multiplied, and nothing of the size of y is written: one pass over
M N elements less, and where N is larger than K the largest temporary beside W is gone (bench/NOTES.md). g B is small.

Of a large W only some columns are dense at a time: each product writes those columns of dx, and reads dy again.

The sums over tokens read dy and what is kept of y as ever (scale.py). Rows whose g is 0 left nothing there: one more launch
asks whether there are any, and forms their products from the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fdora.triton import scale
from fdora.triton.copy import by_g, gradient, in_dtype
from fdora.triton.dequantize import G, decode, redo_lost, room
from fdora.triton.dropout import drop
from fdora.triton.factors import at_once, factor_gradients
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array, Scalar

COLUMNS, AT_ONCE = 512, 2**28  # parts of W are multiples of so many columns, and dense no more bytes than that where they can


class Given(NamedTuple):
    """What the backward of one layer with an adapter reads, and where its gradients beside dx go."""

    dy: Array
    x: Array
    la: Any
    s: Scalar
    h: Array | None
    kept: Array | None
    pre_scale: bool
    grads: Any


def backward_of_codes(
    plan: Builder, given: Given, p: float, dx: Array, dx_of: Callable[[Array, Array, Array, Array], str]
) -> str:
    """``dx_of`` takes columns of dx, and those of g W and of A, and dh, and says how. ``p``: of "lora" dropout, where the layer
    has a seed."""
    dy, x, la, s, h, kept, pre_scale, grads = given
    t, g, (r, K) = x.dtype, G(la.m, la.c), la.A.shape
    both = grads.A is not None and grads.B is not None and at_once(x, dy, r, plan.device.capability)
    config = scale.config_for(plan, dy, r, not both)
    sums = scale.Sums(dm=grads.m, dc=grads.c, dbias=grads.bias, dB=grads.B if config.BLOCK_R else None)
    if any(each is not None for each in sums):
        scale.scale_backward(plan, dy, kept, pre_scale, x, la._replace(W=None), h, sums, config)
    if not pre_scale and (grads.m is not None or grads.c is not None):
        assert h is not None
        redo_lost(plan, la.W, dy, x, h, la.B, g, grads.m, grads.c)
    dh, gB = plan.temp((x.shape[0], r), t), plan.temp(la.B.shape, t)
    by_g(plan, la.B, *g, gB)
    plan.product(dh, dy, gB, s)
    A, how = in_dtype(plan, la.A, t), ""
    width = columns_of(la.W.shape, t.itemsize) if la.seed is None else K  # a mask counts the columns of all of dx
    W = room(plan, (la.W.shape[0], width), t)
    for i in range(0, K, max(1, width)):
        j = min(K, i + width)
        decode(plan, la.W, W.columns(0, j - i), g, i)
        how = dx_of(dx.columns(i, j), W.columns(0, j - i), A.columns(i, j), dh)
    if both:
        assert h is not None
        factor_gradients(plan, drop(plan, x, la.seed, p), dh, grads.A, dy, h, grads.B, g=g)
        return how
    if grads.A is not None:
        gradient(plan, grads.A, dh.T, drop(plan, x, la.seed, p))
    if grads.B is not None and sums.dB is None:
        assert h is not None
        wide = grads.B if grads.B.dtype == torch.float32 else plan.temp(grads.B.shape, torch.float32)
        plan.product(wide, dy.T, h)
        by_g(plan, wide, *g, grads.B)
    return how


def columns_of(shape: tuple[int, int], itemsize: int) -> int:
    """How many are dense at a time: all, or equal parts."""
    N, K = shape
    parts = cdiv(N * K * itemsize, AT_ONCE)
    return K if parts <= 1 else min(K, cdiv(cdiv(K, parts), COLUMNS) * COLUMNS)
