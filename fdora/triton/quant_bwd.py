"""Backward of a layer whose W is codes, for many tokens: no dz.

    dx = dy (g W) + dh A      dh = s dy (g B)      dA = dh^T x      dB = g (dy^T h)

A dense W is decoded for dx anyway, and takes g there: g value(code) scale in float32, rounded once, where a dense layer rounds
dz = g dy and reads a W that is rounded. So dy itself is multiplied, and nothing of the size of y is written: one pass over
M N elements less, and where N is larger than K the largest temporary beside W is gone (bench/NOTES.md). g B is small.

The sums over tokens read dy and what is kept of y as ever (scale.py). Their pass wants rows of W whose g is 0, without it:
these, if there are any, are decoded into the same memory ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdora.triton import scale
from fdora.triton.copy import by_g, gradient, in_dtype
from fdora.triton.dequantize import G, decode, decode_lost, room
from fdora.triton.dropout import drop
from fdora.triton.factors import at_once, factor_gradients
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.plan import Array, Scalar


def backward_of_codes(
    plan: Builder, dy: Array, x: Array, la: Any, s: Scalar, h: Array | None, kept: Array | None, pre_scale: bool, p: float,
    grads: Any, dx_of: Callable[[Array, Array, Array], str],
) -> str:  # fmt: skip
    """``dx_of`` takes g W, A and dh, and says how. ``p``: of "lora" dropout, where the layer has a seed."""
    t, g, r = x.dtype, G(la.m, la.c), la.A.shape[0]
    both = grads.A is not None and grads.B is not None and at_once(x, dy, r, plan.device.capability)
    config = scale.config_for(plan, dy, r, not both)
    sums = scale.Sums(dm=grads.m, dc=grads.c, dbias=grads.bias, dB=grads.B if config.BLOCK_R else None)
    W, lost = room(plan, la.W, t), not pre_scale and (grads.m is not None or grads.c is not None)
    if lost:
        decode_lost(plan, la.W, W, g)
    if any(each is not None for each in sums):
        scale.scale_backward(plan, dy, kept, pre_scale, x, la._replace(W=W if lost else None), h, sums, config)
    decode(plan, la.W, W, g)
    dh, gB = plan.temp((x.shape[0], r), t), plan.temp(la.B.shape, t)
    by_g(plan, la.B, *g, gB)
    plan.product(dh, dy, gB, s)
    how = dx_of(W, in_dtype(plan, la.A, t), dh)
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
