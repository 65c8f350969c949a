"""The whole layer: ``y = g (x W^T + s h B^T) + bias`` with ``h = x A^T`` and ``g = m / c``.

Forward. Products run in x's dtype and come back unrounded (see _matmul); g and bias are applied there, one rounding.
s goes with B, the smallest factor: lora below is s h B^T, and dh is s dz B.
Dropout D(x) has two meanings: "lora" drops the input of the adapter only, h = D(x) A^T; "peft" drops it for the
correction of the base as well:  y = x W^T + (g - 1) D(x) W^T + g s D(x) A^T B^T + bias.

Backward, with dz = g dy and v = base + s lora, base = x W^T (of D(x) for "peft"), all sums over tokens t:
    dx = dz W + s D'(dz B A)          dA = s (dz B)^T D(x)       dbias = sum_t dy
    dB = s dz^T h                     dg = sum_t dy v            dm = dg / c      dc = -dm g (0 where c is at its floor)
and for "peft"  dx = dy W + D'((dz - dy) W + s dz B A).  D' applies the same mask and scale as D.

v is not saved where y can stand in for it, v = (y - bias) / g. Let u = eps / 2. y = g v + bias + e with |e| <= u |y| while y
is a normal number, so that

    |error of dg| <= u / |g| sum_t |dy y|       where v, saved and rounded, would leave    u sum_t |dy v|.

Both sums are known in the backward, the second as S = sum_t |dy (y - bias)|, for  S <= |g| sum_t |dy v| + u sum_t |dy y|.
A column is read off where sum_t |dy y| <= k S with k = 2 (``drowned``): its dg loses at most k / (1 - k u), twice what a
saved v would cost it, one bit of a rounding that dy has as well. Without a bias y - bias is y, and nothing is lost. Other
columns form their products again: those that the bias drowns (Qwen's k: hundreds beside one), and those where |g| < tiny / eps,
so that y may be subnormal or 0 where v is not (rows with m = 0 carry nothing; fp16: 0.06, bf16: 1e-36). With |g| above it, what
y loses as a subnormal number is at most eps^2 of v.
Plain code looks at these sums where looking is free: on a CPU. Everywhere else (GPU, traced, mapped) v is saved: exact,
no sync. So it is in half precision, where that bit would show; kernels save v there too.

A residual is added before the one rounding, y = g v + bias + residual. y then holds v no better than beside a large bias, in
every column: v is saved. A gamma on the whole (LayerScale), y = gamma (g v + bias) + residual, is this layer with m' = gamma m
and bias' = gamma bias: g' = gamma g, and autograd of the two (N,) products gives
    dgamma = m dm' + bias dbias' = sum_t dy (g v + bias)        dm = gamma dm'        dbias = gamma dbias'

Layers that share x share the product for h (``lora_shrink``) and the sum for dx (``accumulate_into``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdora._records import Bound, Dropout, Grads, Needs, Operands, Options, Saved, drowned, eps, layers_in
from fdora._torch import unsafe_view
from fdora.eager._matmul import acc_dtype, cast, is_plain, is_real, matmul, times_g
from fdora.eager.dropout import drop
from fdora.eager.fp8 import base_of, through_base
from fdora.eager.norm import scale


def layers_fwd(
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    residual: Tensor | None = None,
    fp8: bool = False,
) -> tuple[list[Tensor], Saved]:
    """x (..., K) -> each y (..., N), and what backward reads. ``residual``, like the y of a single layer, is added to it.

    ``fp8``: every W is a QuantWeight of e4m3, and layers with an adapter multiply 8-bit numbers (fp8.py).
    """
    flat = as_matrix(x)
    As = [la.A for la in layers if la.A is not None]
    shared = lora_shrink(flat, As) if len(As) > 1 and not drop.p else None
    given = iter([None] * len(As) if shared is None else shared.split([A.shape[0] for A in As], 1))
    ys, hs, kept, pre_scale = [], [], [], []
    for la, o in zip(layers, options, strict=True):
        if la.A is None:
            y, v = frozen_fwd(flat, la.W.dequantize(x.dtype) if fp8 else la.W, la.bias), None
        else:
            base = base_of(flat, la.W) if fp8 else None
            # The value before g is what the rounded x gave: backward, which has x and the decoded W, could not form it again.
            o = Options(o.s, "pre_scale") if fp8 and o.save != "nothing" else o
            y, h, v = linear_fwd(flat, la, o, drop, next(given), None if residual is None else as_matrix(residual), base)
            hs.append(h)
        ys.append(shaped(y, x))
        kept.append(ys[-1] if v is None and o.save != "nothing" else v)
        pre_scale.append(v is not None)
    if shared is None and hs:
        shared = hs[0] if len(hs) == 1 else torch.cat(hs, 1)
    return ys, Saved(shared, tuple(kept), tuple(pre_scale))


def layers_bound(_: tuple[Tensor | None, ...], options: Sequence[Options], drop: Dropout, **dense: Any) -> Bound:
    """The same of x and the operands one behind the other, every W a tensor."""

    def bound(tensors: tuple[Any, ...]) -> Any:
        ys, (h, kept, pre_scale, _) = layers_fwd(tensors[0], layers_in(tensors[1:]), options, drop)
        return ys, (h,), kept, pre_scale

    return bound


def layers_bwd(
    dys: Sequence[Tensor | None],
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    saved: Saved,
    need_x: bool,
    needs: Sequence[Needs],
    fp8: bool = False,
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of each layer; those of bias in acc_dtype. A dy of None: nobody asked for this y.

    A list of dys is emptied. ``fp8``: every W is a QuantWeight of e4m3, and dz rounded to 8 bits for dx.
    """
    flat = as_matrix(x)
    ranks = [la.A.shape[0] for la in layers if la.A is not None]
    hs = iter(() if saved.h is None else saved.h.split(ranks, 1) if len(ranks) > 1 else (saved.h,))
    dx: Tensor | None = None
    grads: list[Grads] = []
    for i, (la, o, kept, pre, need) in enumerate(zip(layers, options, saved.kept, saved.pre_scale, needs, strict=True)):
        dy, h = dys[i], None if la.A is None else next(hs)
        if isinstance(dys, list):  # it can go as soon as it was used
            dys[i] = None
        if dy is None:
            grads.append(Grads())
        elif h is None:
            dx, dbias = frozen_bwd(as_matrix(dy), la.W.dequantize(x.dtype) if fp8 else la.W, need_x, need.bias, dx)
            grads.append(Grads(bias=dbias))
        else:
            v = None if kept is None else as_matrix(kept)
            dx, each = linear_bwd(as_matrix(dy), flat, la, o.s, drop, h, v, pre, need_x, need, dx, fp8)
            grads.append(each)
    return dx if dx is None or x.dim() == 2 else dx.reshape(x.shape), grads


def as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K). Not ``reshape(-1, K)``: that has no answer for K = 0."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x[None]


def own(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Autograd forbids callers to write over a view that a Function returns; over a tensor of its own they may."""
    return unsafe_view(y, shape) if is_plain(y) and y.is_contiguous() else y.reshape(shape)


def shaped(y: Tensor, x: Tensor) -> Tensor:
    """y (M, N) with the leading axes of x."""
    return y if x.dim() == 2 else own(y, (*x.shape[:-1], y.shape[-1]))


def linear_fwd(
    x: Tensor,
    la: Any,
    o: Options,
    dropout: Dropout,
    h: Tensor | None,
    residual: Tensor | None,
    base: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x (M, K) -> y (M, N), h (M, r) and, when y cannot stand in for it, v, all in x's dtype. ``base``: x W^T if known."""
    W, A, B, m, c, bias, seed = la
    t, acc = x.dtype, acc_dtype(x.dtype)
    g = scale(m, c)
    xd = drop(x, seed, dropout.p)
    if h is None:
        h = xd @ A.to(t).T
    lora = matmul(h, scaled(B, o.s, t).T)
    w: Any = None if base is not None else W.to(t).T
    both_dropped = seed is not None and dropout.mode == "peft"
    if both_dropped:
        base = matmul(xd, w)
        v = base + lora
        out = matmul(x, w) + ((g - 1) * base + g * lora)
        out = out if bias is None else out + bias.to(acc)
    else:
        v = matmul(x, w) + lora if base is None else base + lora
        out = v * g if bias is None else torch.addcmul(bias.to(acc), v, g)
    y = cast(out if residual is None else out + residual.to(acc), t)
    readable = is_plain(g) and (bias is None or (is_plain(x) and t == acc))  # half precision: as kernels
    if o.save == "nothing" or (o.save == "output" and not both_dropped and readable):
        return y, h, None
    return y, h, cast(v, t)


def linear_bwd(
    dy: Tensor,
    x: Tensor,
    la: Any,
    s: float,
    dropout: Dropout,
    h: Tensor,
    kept: Tensor | None,
    pre_scale: bool,
    need_x: bool,
    needs: Needs,
    accumulate_into: Tensor | None,
    fp8: bool,
) -> tuple[Tensor | None, Grads]:
    """dx, added to ``accumulate_into`` in place where torch.func and compilers do not look, and what ``needs`` asks for."""
    W, A, B, m, c, bias, seed = la
    t, acc = x.dtype, acc_dtype(x.dtype)
    g = scale(m, c)
    wide = dy.to(acc)
    dz = times_g(wide, g, t)
    dx, dA, dB, dm, dc = accumulate_into, None, None, None, None

    dh = dz @ scaled(B, s, t) if need_x or needs.A else None
    if need_x:
        assert dh is not None
        w = W if fp8 else W.to(t)
        through_A = drop(matmul(dh, A.to(t)), seed, dropout.p)
        if fp8:
            part = through_base(dz, W) + through_A
        elif seed is not None and dropout.mode == "peft":
            part = matmul(dy, w) + drop(matmul(times_g(wide, g - 1, t), w), seed, dropout.p) + through_A
        else:
            part = matmul(dz, w) + through_A
        dx = _plus(accumulate_into, part, t)
    if needs.A:
        assert dh is not None
        dA = cast(matmul(dh.T, drop(x, seed, dropout.p)), A.dtype)
    if needs.B:
        dB = cast(s * matmul(dz.T, h), B.dtype)
    if needs.m or needs.c:
        assert kept is not None
        kept = kept.to(acc)
        if fp8 and not pre_scale:  # lost columns read it
            la = Operands(W.dequantize(t), A, B, m, c, bias, seed)
        dg = (wide * kept).sum(0) if pre_scale else _dg_of_output(wide, kept, g, la, s, x, h)
        dm, dc = magnitude_grads(dg, m, c, g, needs)
    return dx, Grads(dA, dB, dm, dc, wide.sum(0) if needs.bias else None)


def magnitude_grads(dg: Tensor, m: Tensor, c: Tensor, g: Tensor, needs: Any) -> tuple[Tensor | None, Tensor | None]:
    """dm and dc, of any number of layers at once."""
    wide_dm = dg / c.clamp_min(eps())
    dm = cast(wide_dm, m.dtype) if needs.m else None
    return dm, torch.where(c > eps(), -wide_dm * g, 0) if needs.c else None


def lora_shrink(x: Tensor, As: Sequence[Tensor]) -> Tensor:
    """The h of several layers side by side, (M, sum of r): one product reads x once."""
    return x @ torch.cat([A.to(x.dtype) for A in As]).T


def output(pre_scale: Tensor, m: Tensor, c: Tensor, bias: Tensor | None) -> Tensor:
    """y again from the value before g, without "peft" dropout: the same bits where that was not rounded."""
    g, wide = scale(m, c), pre_scale.to(acc_dtype(pre_scale.dtype))
    return cast(wide * g if bias is None else torch.addcmul(bias.to(wide.dtype), wide, g), pre_scale.dtype)


def frozen_fwd(x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
    """A layer of the group that has no adapter."""
    return F.linear(x, W.to(x.dtype), None if bias is None else bias.to(x.dtype))


def frozen_bwd(
    dy: Tensor, W: Tensor, need_x: bool, need_bias: bool, accumulate_into: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dx, added to ``accumulate_into``, and dbias (in acc_dtype)."""
    dx, w = accumulate_into, W.to(dy.dtype)
    if need_x:
        in_place = dx is not None and is_real(dx) and is_real(dy)
        dx = dx.addmm_(dy, w) if dx is not None and in_place else _plus(dx, dy @ w, dy.dtype)
    return dx, dy.to(acc_dtype(dy.dtype)).sum(0) if need_bias else None


def _plus(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """total + part, rounded once. In place, except where vmap may have mapped one of them only, or a compiler traces."""
    if total is None:
        return cast(part, dtype)
    return total.add_(part) if is_real(total) and is_real(part) else cast(total + part, dtype)


def scaled(B: Tensor, s: float | Tensor, dtype: torch.dtype) -> Tensor:
    """s B for a product in ``dtype``: scaling the (N, r) factor saves a pass over the (M, N) product."""
    return cast(s * B.to(acc_dtype(dtype)), dtype)


def _dg_of_output(dy: Tensor, y: Tensor, g: Tensor, la: Any, s: float, x: Tensor, h: Tensor) -> Tensor:
    """sum_t dy v with v read off y, in float32 as dy is; where it is lost the products are formed again."""
    W, _, B, _, _, bias, _ = la
    t, info = x.dtype, torch.finfo(x.dtype)
    of_v = dy * (y if bias is None else y - bias.to(y.dtype))
    dg, lost = of_v.sum(0) / g, g.abs() < info.tiny / info.eps
    if bias is not None:
        lost = lost | ~((dy * y).abs().sum(0) <= drowned() * of_v.abs().sum(0))  # nor is it read beside an infinite bias
    if not is_plain(lost):
        return torch.where(lost, (dy * (matmul(x, W.to(t).T) + matmul(h, scaled(B, s, t).T))).sum(0), dg)
    n = lost.nonzero().flatten()
    if len(n):
        v = matmul(x, W[n].to(t).T) + matmul(h, scaled(B[n], s, t).T)
        dg = dg.index_copy(0, n, (dy[:, n] * v).sum(0))
    return dg
