"""The whole layer: ``y = g (x W^T + s h B^T) + bias`` with ``h = x A^T`` and ``g = m / c``.

Forward. Products run in x's dtype and come back unrounded (see _matmul); g and bias are applied there, one rounding.
s goes with B, the smallest factor: lora below is s h B^T, and dh is s dz B.
Dropout D(x) has two meanings: "lora" drops the input of the adapter only, h = D(x) A^T; "peft" drops it for the
correction of the base as well:  y = x W^T + (g - 1) D(x) W^T + g s D(x) A^T B^T + bias.

Backward, with dz = g dy and inner = base + s lora, base = x W^T (of D(x) for "peft"), all sums over tokens t:
    dx = dz W + s D'(dz B A)          dA = s (dz B)^T D(x)       dbias = sum_t dy
    dB = s dz^T h                     dg = sum_t dy inner        dm = dg / c      dc = -dm g (0 where c is at its floor)
and for "peft"  dx = dy W + D'((dz - dy) W + s dz B A).  D' applies the same mask and scale as D.

inner is not kept when y can stand in for it: inner = y / g needs no bias (a bias of hundreds leaves no digits of inner
in y) and |g| not so small that y is subnormal or zero (rows with m = 0 carry nothing). Both are known in the forward: the
second by looking at g, where looking is free. Everywhere else (GPU, traced, mapped) inner is kept: exact, and no sync.

Layers that share x share the product for h (``down``; it comes in as ``h``) and the sum for dx (``onto``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fdora.eager._matmul import acc_dtype, cast, is_plain, is_real, matmul
from fdora.eager.dropout import drop
from fdora.eager.norm import EPS, scale

DropoutMode = Literal["lora", "peft"]
Keep = Literal["nothing", "output", "inner"]  # what the gradient of m will read; "output" allows inner where y won't do


def linear_fwd(
    x: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    c: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    s: float,
    p: float,
    mode: DropoutMode,
    keep: Keep,
    h: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """x (M, K) -> y (M, N), h (M, r) and, when y cannot stand in for it, inner (M, N), all in x's dtype."""
    t, acc = x.dtype, acc_dtype(x.dtype)
    g = scale(m, c)
    xd = drop(x, seed, p)
    if h is None:
        h = xd @ A.to(t).T
    lora = matmul(h, _scaled(B, s, t).T)
    w = W.to(t).T
    both_dropped = seed is not None and mode == "peft"
    if both_dropped:
        base = matmul(xd, w)
        inner = base + lora
        out = matmul(x, w) + ((g - 1) * base + g * lora)
        out = out if bias is None else out + bias.to(acc)
    else:
        inner = matmul(x, w) + lora
        out = inner * g if bias is None else torch.addcmul(bias.to(acc), inner, g)
    y = cast(out, t)
    if keep == "nothing" or (keep == "output" and bias is None and not both_dropped and _recoverable(g, t)):
        return y, h
    return y, h, cast(inner, t)


def linear_bwd(
    dy: Tensor,
    x: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    c: Tensor,
    h: Tensor,
    kept: Tensor | None,
    seed: Tensor | None,
    s: float,
    p: float,
    mode: DropoutMode,
    kept_inner: bool,
    needs: tuple[bool, ...],
    onto: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """dx, dA, dB, dm, dc, dbias (the last in acc_dtype); each only when ``needs``, in that order, asks for it.

    dx is added to ``onto``, in place where torch.func and compilers do not look.
    """
    need_x, need_A, need_B, need_m, need_c, need_bias = needs
    t, acc = x.dtype, acc_dtype(x.dtype)
    g = scale(m, c)
    wide = dy.to(acc)
    wide_dz = wide * g
    dz = wide_dz.to(t)
    dx = dA = dB = dm = dc = None

    dh = dz @ _scaled(B, s, t) if need_x or need_A else None
    if need_x:
        assert dh is not None
        w = W.to(t)
        through_A = drop(matmul(dh, A.to(t)), seed, p)
        if seed is not None and mode == "peft":
            dx = matmul(dy, w) + drop(matmul((wide_dz - wide).to(t), w), seed, p) + through_A
        else:
            dx = matmul(dz, w) + through_A
        dx = _plus(onto, dx, t)
    if need_A:
        assert dh is not None
        dA = cast(matmul(dh.T, drop(x, seed, p)), A.dtype)
    if need_B:
        dB = cast(s * matmul(dz.T, h), B.dtype)
    if need_m or need_c:
        assert kept is not None
        dg = (wide * kept.to(acc)).sum(0)
        if not kept_inner:
            dg = dg / g  # |g| is bounded away from 0 here, see _recoverable
        wide_dm = dg / c.clamp_min(EPS)
        dm = cast(wide_dm, m.dtype) if need_m else None
        dc = torch.where(c > EPS, -wide_dm * g, 0) if need_c else None
    return dx, dA, dB, dm, dc, wide.sum(0) if need_bias else None


def down(x: Tensor, As: Sequence[Tensor], s: Sequence[float]) -> Tensor | None:
    """The h of several layers side by side, (M, sum of r): one product reads x once. None: each layer does better alone."""
    return x @ torch.cat([A.to(x.dtype) for A in As]).T


def output(inner: Tensor, m: Tensor, c: Tensor, bias: Tensor | None) -> Tensor:
    """y again from inner, without "peft" dropout: the same bits where inner was not rounded."""
    g, wide = scale(m, c), inner.to(acc_dtype(inner.dtype))
    return cast(wide * g if bias is None else torch.addcmul(bias.to(wide.dtype), wide, g), inner.dtype)


def frozen_fwd(x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
    """A layer of the group that has no adapter."""
    return F.linear(x, W.to(x.dtype), None if bias is None else bias.to(x.dtype))


def frozen_bwd(
    dy: Tensor, W: Tensor, needs: tuple[bool, bool], onto: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """dx, added to ``onto``, and dbias (in acc_dtype)."""
    dx, w = None, W.to(dy.dtype)
    if needs[0]:
        dx = onto.addmm_(dy, w) if onto is not None and is_real(onto) and is_real(dy) else _plus(onto, dy @ w, dy.dtype)
    return dx, dy.to(acc_dtype(dy.dtype)).sum(0) if needs[1] else None


def _plus(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """total + part, rounded once. In place, except where vmap may have mapped one of them only, or a compiler traces."""
    if total is None:
        return cast(part, dtype)
    return total.add_(part) if is_real(total) and is_real(part) else cast(total + part, dtype)


def _scaled(B: Tensor, s: float, dtype: torch.dtype) -> Tensor:
    """s B for a product in ``dtype``: scaling the (N, r) factor saves a pass over the (M, N) product."""
    return cast(s * B.to(acc_dtype(dtype)), dtype)


def _recoverable(g: Tensor, dtype: torch.dtype) -> bool:
    """Whether y / g gives inner back in every row.

    y = round(g inner) keeps all its digits while |g inner| >= tiny. With |g| >= tiny / eps that holds for |inner| >= eps;
    smaller ones are off by at most eps^2. (fp16: |g| >= 0.06, bf16: 1e-36.)
    """
    if not is_plain(g):
        return False
    info = torch.finfo(dtype)
    return not bool((g.abs() < info.tiny / info.eps).any())
