"""Many adapters without a look at the offsets: the low-rank products of each run over all tokens, and ``where`` keeps its own.

A NaN or an infinity stays with its tokens and its adapter: nothing is multiplied by a mask. The base product runs once, the
low-rank ones G times.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdora._records import Bank, BankNeeds
from fdora.eager._matmul import acc_dtype, cast, matmul, times_g
from fdora.eager.dropout import drop
from fdora.eager.fp8 import base_of, through_base
from fdora.eager.linear import magnitude_grads, scaled
from fdora.eager.norm import scale
from fdora.quant import QuantWeight


def sort(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t[order]


def unsort(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t[order.argsort()]


def route(ids: Tensor, adapters: int) -> tuple[Tensor, Tensor, None]:
    """(M,) the adapter of each token -> offsets (G,) int32 and order (M,) int64, without a look at the values. None: the
    inverse of order is for who wants it."""
    key = torch.where((ids < 0) | (ids >= adapters), adapters, ids.long())
    ends = (key[None] <= torch.arange(adapters, device=ids.device)[:, None]).sum(1)
    return ends.to(torch.int32), key.argsort(stable=True), None


def adapter_of(offsets: Tensor, tokens: int) -> Tensor:
    """(M,) int64: whose each sorted token is; G where it is nobody's."""
    t = torch.arange(tokens, device=offsets.device)
    return (t[:, None] >= offsets).sum(1)


def cut(A: Tensor, B: Tensor, ranks: tuple[int, ...] | None) -> list[tuple[Tensor, Tensor]]:
    """A and B of each adapter, without what is beyond its rank."""
    ranks = (A.shape[1],) * A.shape[0] if ranks is None else ranks
    return [(a[:r], b[:, :r]) for a, b, r in zip(A.unbind(), B.unbind(), ranks, strict=True)]


def forward(x: Tensor, bank: Bank, save_for_dm: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    x, t, acc, r = sort(x, bank.order), x.dtype, acc_dtype(x.dtype), bank.A.shape[1]
    who = adapter_of(bank.offsets, x.shape[0])
    xd = _drop(x, bank, who)
    h = x.new_zeros((x.shape[0], r))
    for g, (A, _) in enumerate(cut(bank.A, bank.B, bank.ranks)):
        h_g = xd @ A.to(t).T
        h = torch.where((who == g)[:, None], F.pad(h_g, (0, r - h_g.shape[1])), h)
    v = _before_g(x, h, bank, who, bank.W)
    g_t = _g(bank, who)
    out = v if g_t is None else v * g_t
    y = cast(out if bank.bias is None else out + bank.bias.to(acc), t)
    return y, h, (cast(v, t), torch.ones_like(bank.offsets, dtype=torch.bool)) if save_for_dm else ()


def _before_g(x: Tensor, h: Tensor, bank: Bank, who: Tensor, W: Any) -> Tensor:
    """x W^T + s h B^T of each token, in acc_dtype."""
    v = base_of(x, W) if isinstance(W, QuantWeight) else matmul(x, W.to(x.dtype).T)
    for g, (_, B) in enumerate(cut(bank.A, bank.B, bank.ranks)):
        v = torch.where((who == g)[:, None], v + matmul(h[:, : B.shape[1]], scaled(B, bank.s[g], x.dtype).T), v)
    return v


def backward(
    dy: Tensor, x: Tensor, bank: Bank, h: Tensor, kept: tuple[Tensor, ...], needs: BankNeeds
) -> tuple[Tensor | None, ...]:
    """dx, dA, dB, dm, dc; dx is sorted."""
    dy, x = sort(dy, bank.order), sort(x, bank.order)
    t, acc, r = x.dtype, acc_dtype(x.dtype), bank.A.shape[1]
    who = adapter_of(bank.offsets, x.shape[0])
    xd = _drop(x, bank, who)
    wide, g_t = dy.to(acc), _g(bank, who)
    dz = dy if g_t is None else times_g(wide, g_t, t)
    low, dAs, dBs, dgs = torch.zeros_like(x, dtype=acc), [], [], []
    # y alone is kept by a forward that could look at its values: from it not every column is read back, so form it again.
    W, fp8 = bank.W, isinstance(bank.W, QuantWeight)
    dense = W.dequantize(t) if fp8 and len(kept) == 1 else W
    products = wide * (_before_g(x, h, bank, who, dense) if len(kept) == 1 else kept[0].to(acc)) if kept else None
    for g, (A, B) in enumerate(cut(bank.A, bank.B, bank.ranks)):
        own, b = (who == g)[:, None], scaled(B, bank.s[g], t)
        dh = torch.where(own, dz @ b, 0)
        if needs.x:
            low = torch.where(own, matmul(dh, A.to(t)), low)
        if needs.A:
            dA = cast(matmul(dh.T, torch.where(own, xd, 0)), bank.A.dtype)
            dAs.append(F.pad(dA, (0, 0, 0, r - dA.shape[0])))
        if needs.B:
            dB = bank.s[g] * matmul(torch.where(own, dz, 0).T, torch.where(own, h[:, : B.shape[1]], 0))
            dBs.append(F.pad(cast(dB, bank.B.dtype), (0, r - dB.shape[1])))
        if products is not None:
            dgs.append(torch.where(own, products, 0).sum(0))
    dx = cast((through_base(dz, W) if fp8 else matmul(dz, W.to(t))) + _drop(low, bank, who), t) if needs.x else None
    dm = dc = None
    if dgs:
        assert bank.m is not None and bank.c is not None
        dm, dc = magnitude_grads(torch.stack(dgs), bank.m, bank.c, scale(bank.m, bank.c), needs)
    return dx, torch.stack(dAs) if dAs else None, torch.stack(dBs) if dBs else None, dm, dc


def _g(bank: Bank, who: Tensor) -> Tensor | None:
    """Of each token, (M, N); 1 for those of no adapter."""
    if bank.m is None or bank.c is None:
        return None
    g = scale(bank.m, bank.c)
    return torch.cat([g, torch.ones_like(g[:1])])[who]


def _drop(x: Tensor, bank: Bank, who: Tensor) -> Tensor:
    """Each token counted from the start of its segment, under the seed of its adapter."""
    if bank.seed is None:
        return x
    starts = torch.cat([torch.zeros_like(bank.offsets[:1]), bank.offsets])
    rows = torch.arange(x.shape[0], device=x.device) - starts[who]
    seed, each = bank.seed[: bank.A.shape[0]], bank.seed[bank.A.shape[0] :].view(torch.float64)
    p = torch.cat([each, each[:1]])[who][:, None] if len(each) else bank.p
    return drop(x, torch.cat([seed, seed[:1]])[who], p, rows)
