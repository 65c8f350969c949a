"""Many adapters on one W: ``y_t = g_a (x_t W^T + s_a h_t B_a^T) + bias`` with ``h_t = x_t A_a^T``, a the adapter of token t.

Tokens of no adapter get ``x_t W^T + bias``.

Two ways to the same numbers; neither asks a GPU for a length.

by segments  where offsets can be read for free: the code of linear.py on the tokens of each adapter, so that its values and
             gradients are the bits of a call of its own. The last of them depend on how the operands of a product are aligned:
             A and h are copied to begin where tensors of their own would. W is read for each adapter that has tokens.
masked       elsewhere (on a GPU, traced, offsets that are mapped): the base product runs once, the low-rank ones of each
             adapter over all tokens, and ``where`` keeps its own. A NaN or an infinity stays with its tokens and its
             adapter: nothing is multiplied by a mask.

Gradients are those of linear.py, of each adapter over its own tokens; dbias is the sum over all of them.
W (G, N, K), bias (G, N): each adapter is an expert with a weight of its own. By segments only; tokens of nobody get zeros.
Rows of A and columns of B that are zero beyond an adapter's rank give zeros in h, and so in dA and dB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fdora._records import Bank, BankNeeds, Dropout, Needs, Operands, Options
from fdora.eager._matmul import acc_dtype, cast, is_plain, matmul, times_g
from fdora.eager.dropout import drop
from fdora.eager.fp8 import base_of, through_base
from fdora.eager.linear import frozen_bwd, frozen_fwd, linear_bwd, linear_fwd, magnitude_grads, scaled
from fdora.eager.norm import default_bytes, direct, scale, tile_of
from fdora.quant import QuantWeight

Kept = tuple[Tensor, ...]
"""What dm reads beside h: nothing where y itself will do."""


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


def _forward_masked(x: Tensor, bank: Bank, save_for_dm: bool) -> tuple[Tensor, Tensor, Kept]:
    x, t, acc, r = sort(x, bank.order), x.dtype, acc_dtype(x.dtype), bank.A.shape[1]
    who = adapter_of(bank.offsets, x.shape[0])
    xd = _drop(x, bank, who)
    h = x.new_zeros((x.shape[0], r))
    for g, (A, _) in enumerate(cut(bank.A, bank.B, bank.ranks)):
        h_g = xd @ A.to(t).T
        h = torch.where((who == g)[:, None], F.pad(h_g, (0, r - h_g.shape[1])), h)
    peft = bank.mode == "peft"
    v = _before_g(xd if peft else x, h, bank, who, bank.W)
    g_t = _g(bank, who)
    out = v if g_t is None else v * g_t
    if g_t is not None and peft:
        out = _before_g(x, h, bank, who, bank.W) + (g_t - 1) * v
    y = cast(out if bank.bias is None else out + bank.bias.to(acc), t)
    return y, h, (cast(v, t), torch.ones_like(bank.offsets, dtype=torch.bool)) if save_for_dm else ()


def _before_g(x: Tensor, h: Tensor, bank: Bank, who: Tensor, W: Any) -> Tensor:
    """x W^T + s h B^T of each token, in acc_dtype."""
    v = base_of(x, W) if isinstance(W, QuantWeight) else matmul(x, W.to(x.dtype).T)
    for g, (_, B) in enumerate(cut(bank.A, bank.B, bank.ranks)):
        v = torch.where((who == g)[:, None], v + matmul(h[:, : B.shape[1]], scaled(B, bank.s[g], x.dtype).T), v)
    return v


def _backward_masked(dy: Tensor, x: Tensor, bank: Bank, h: Tensor, kept: Kept, needs: BankNeeds) -> tuple[Tensor | None, ...]:
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
    first = dz
    if g_t is not None and bank.mode == "peft":
        first, low = dy, low + matmul(times_g(wide, g_t - 1, t), W.to(t))
    dx = cast((through_base(first, W) if fp8 else matmul(first, W.to(t))) + _drop(low, bank, who), t) if needs.x else None
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


def multi_fwd(x: Tensor, bank: Bank, save_for_dm: bool) -> tuple[Tensor, Tensor, Kept]:
    """x (M, K) -> y (M, N), h (M, r) in sorted order, and what dm reads beside h: nothing where y itself will do."""
    y, h, kept = (_forward if _readable(bank) else _forward_masked)(x, bank, save_for_dm)
    return unsort(y, bank.order), h, kept


def multi_bwd(dy: Tensor, x: Tensor, bank: Bank, h: Tensor, kept: Kept, needs: BankNeeds) -> tuple[Tensor | None, ...]:
    """dx, dA, dB, dm, dc, each of its parameter's dtype, and dbias in acc_dtype; None where it is not needed.

    ``kept`` as :func:`multi_fwd` returned it, ``(y,)`` where that was empty; ``()`` where neither dm nor dc is needed.
    """
    backward = _backward if _readable(bank) else _backward_masked
    dx, dA, dB, dm, dc, *own = backward(dy, x, bank, h, kept, needs)
    if own:
        (dbias,) = own
    else:
        dbias = dy.to(acc_dtype(dy.dtype)).sum(0) if needs.bias else None
    return None if dx is None else unsort(dx, bank.order), dA, dB, dm, dc, dbias


def bank_norm(
    W: Tensor, A: Tensor, B: Tensor, s: Tensor, ranks: tuple[int, ...] | None, max_bytes: int | None = None
) -> Tensor:
    """(N, K), (G, r, K), (G, N, r), (G,) -> c (G, N) in acc_dtype(W.dtype). A tile of W serves all adapters at once.

    W (G, N, K): each adapter, an expert, has its own.
    """
    if W.dim() == 3:
        each = zip(W.split(1), A.split(1), B.split(1), s.split(1), strict=True)
        return torch.cat([bank_norm(w[0], a, b, own, None, max_bytes) for w, a, b, own in each])
    rows, cols = tile_of(W, A[0], B[0], False, default_bytes(W.device) if max_bytes is None else max_bytes)
    As, Bs = zip(*cut(A, B, ranks), strict=True)
    return torch.cat(direct(W, As, Bs, s.to(acc_dtype(W.dtype)).unbind(), rows, cols), 1)


class Segment(NamedTuple):
    """Tokens of one adapter, and the layer that it makes of W; those of no adapter have no la."""

    g: int
    first: int
    end: int
    la: Any
    s: float

    def sorted(self, t: Tensor) -> Tensor:
        return t[self.first : self.end]

    def of(self, t: Tensor, order: Tensor | None) -> Tensor:
        """Its tokens of what is in the caller's order."""
        return self.sorted(t) if order is None else t[self.sorted(order)]


def segments(bank: Bank, tokens: int) -> Iterator[Segment]:
    """Where there are tokens. At least one, which may be empty."""
    last, own = 0, bank.W.ndim == 3
    adapters = cut(bank.A, bank.B, bank.ranks)
    for g, (end, s, (A, B)) in enumerate(zip(bank.offsets.tolist(), bank.s.tolist(), adapters, strict=True)):
        if last < end:
            ones = bank.A.new_ones(bank.W.shape[0], dtype=acc_dtype(bank.W.dtype)) if bank.m is None else None
            m, c = (ones, ones) if bank.m is None or bank.c is None else (bank.m[g], bank.c[g])
            seed = None if bank.seed is None else bank.seed[g]
            W, bias = (bank.W[g], None if bank.bias is None else bank.bias[g]) if own else (bank.W, bank.bias)
            yield Segment(g, last, end, Operands(W, A.clone(), B, m, c, bias, seed), s)
            last = end
    if last < tokens or last == 0:
        yield Segment(-1, last, tokens, None, 1.0)


def _readable(bank: Bank) -> bool:
    apart = bank.seed is not None and bank.seed.shape[0] > bank.A.shape[0] and not is_plain(bank.seed)
    return is_plain(bank.offsets) and is_plain(bank.s) and not apart


def _ratio(bank: Bank, g: int) -> float:
    G = bank.A.shape[0]
    return bank.p if bank.seed is None or bank.seed.shape[0] == G else float(bank.seed[G + g].view(torch.float64))


def _forward(x: Tensor, bank: Bank, save_for_dm: bool) -> tuple[Tensor, Tensor, Kept]:
    ys, hs, kept = [], [], []
    pre_scale, fp8 = [False] * bank.A.shape[0], isinstance(bank.W, QuantWeight)
    for each in segments(bank, x.shape[0]):
        xs, v = each.of(x, bank.order), None
        base = base_of(xs, bank.W) if fp8 else None
        if each.la is None:
            h = x.new_zeros((xs.shape[0], bank.A.shape[1]))
            if base is not None:
                y = cast(base if bank.bias is None else base + bank.bias.to(base.dtype), x.dtype)
            else:
                y = frozen_fwd(xs, bank.W, bank.bias) if bank.W.ndim == 2 else x.new_zeros((xs.shape[0], bank.W.shape[1]))
        else:
            save = Options(each.s, ("pre_scale" if fp8 else "output") if save_for_dm else "nothing")  # as layers_fwd
            y, h, v = linear_fwd(xs, each.la, save, Dropout(_ratio(bank, each.g), bank.mode), None, None, base)
            h = F.pad(h, (0, bank.A.shape[1] - h.shape[1]))
            pre_scale[each.g] = v is not None
        ys.append(y)
        hs.append(h)
        kept.append(y if v is None else v)
    if not any(pre_scale):
        return _cat(ys), _cat(hs), ()
    return _cat(ys), _cat(hs), (_cat(kept), torch.tensor(pre_scale))


def _backward(dy: Tensor, x: Tensor, bank: Bank, h: Tensor, kept: Kept, needs: BankNeeds) -> tuple[Tensor | None, ...]:
    """dx, dA, dB, dm, dc, and of experts dbias."""
    dxs: list[Any] = []
    found: list[tuple[Any, ...]] = [(None,) * 5] * bank.A.shape[0]
    experts, fp8 = bank.W.ndim == 3, isinstance(bank.W, QuantWeight)
    pre_scale = kept[1].tolist() if len(kept) == 2 else [False] * bank.A.shape[0]
    need = Needs(*needs[1:5], bias=experts and needs.bias)
    for each in segments(bank, x.shape[0]):
        if each.la is None:
            rest = each.of(dy, bank.order)
            nothing = rest.new_zeros((rest.shape[0], x.shape[1])) if experts else None
            through = cast(through_base(rest, bank.W), x.dtype) if fp8 and needs.x else nothing
            dxs.append(through if experts or fp8 else frozen_bwd(rest, bank.W, needs.x, False, None)[0])
            continue
        dys, xs = each.of(dy, bank.order), each.of(x, bank.order)
        own_h = each.sorted(h)[:, : each.la.A.shape[0]].clone()
        v = None if not kept else each.of(kept[0], bank.order) if len(kept) == 1 else each.sorted(kept[0])
        pre = pre_scale[each.g]
        drop = Dropout(_ratio(bank, each.g), bank.mode)
        dx, grads = linear_bwd(dys, xs, each.la, each.s, drop, own_h, v, pre, needs.x, need, None, fp8)
        dxs.append(dx)
        found[each.g] = grads[:5]
    likes = (bank.A, bank.B, bank.m, bank.c, *([bank.bias] if experts else ()))
    out = [
        stacked(like, [each[i] for each in found]) if want else None
        for i, (like, want) in enumerate(zip(likes, needs[1 : 1 + len(likes)], strict=True))
    ]
    return _cat(dxs) if needs.x else None, *out


def stacked(like: Any, grads: list[Tensor | None]) -> Tensor:
    """The gradient of a bank from those of its adapters: zeros beyond their ranks, and where there is none."""
    shape = like.shape[1:]
    whole = [torch.zeros_like(like[0]) if d is None else _filled(d, shape) for d in grads]
    return cast(torch.stack(whole), like.dtype)


def _filled(d: Tensor, shape: Any) -> Tensor:
    missing = [after for n, have in zip(reversed(shape), reversed(d.shape), strict=True) for after in (0, n - have)]
    return F.pad(d, missing) if any(missing) else d


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
