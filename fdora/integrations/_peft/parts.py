"""A layer of tensor parallelism on this process's parts, with few collectives beside those of its activations.

PEFT's A, B and m are plain and whole in every process, or parts already. The product is dora_linear on parts; x and y stay
DTensors, which the hooks around the base layer laid out and want back.

rows of W      nothing is sent in forward
columns of W   the squares of the norm are added up over the processes, in every call, whatever one of them has kept

The gradient of what is whole is a sum over the processes: those of one layer are one all-reduce. Rows of a whole m or B stand
among zeros there, where they would want a gather of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._torch import all_reduce_sum, eager_apply, is_traced, piece_of
from fdora.functional import dora_linear


class Cut(NamedTuple):
    """How this process's part is made of a parameter."""

    whole: bool = False
    """It is whole, and its gradient a sum over the processes; else it is the part."""
    axis: int = 0
    start: int = 0
    length: int = -1
    """Of the slice along the axis; -1 where all of it is wanted."""


class Parts(NamedTuple):
    """W, A, B and m of this process; how A, B and m are cut."""

    W: Tensor
    factors: tuple[Any, Any, Any]
    cuts: tuple[Cut, Cut, Cut]
    over: Any
    rows: bool

    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """W, A and B without a graph, for their norm: the same objects in every call, unless one is a slice."""
        A, B = (sliced(held(t), cut) for t, cut in zip(self.factors[:2], self.cuts[:2], strict=True))
        return self.W, A, B


def parts_of(W: Any, A: Any, B: Any, m: Any) -> Parts | None:
    """None where they lie in another way: then they go through the door for DTensors."""
    (lies, *more), piece = W.placements, piece_of(W)
    if is_traced() or more or piece is None or not (lies.is_shard(0) or lies.is_shard(1)) or W.requires_grad:
        return None
    axis = lies.dim
    count, length = W.device_mesh.size(), W.shape[axis]
    if length < count:  # a part may be as long as the whole: one process would take for whole what another takes for its part
        return None
    start, here = min(length, W.device_mesh.get_local_rank() * -(-length // count)), piece.shape[axis]
    follows = (False, True, True) if axis == 0 else (True, False, False)
    cuts = [cut_of(t, axis, start, here, length) if f else whole_of(t) for t, f in zip((A, B, m), follows, strict=True)]
    of_A, of_B, of_m = cuts
    if of_A is None or of_B is None or of_m is None:
        return None
    return Parts(piece, (A, B, m), (of_A, of_B, of_m), (W.device_mesh, 0), axis == 0)


def whole_of(t: Any) -> Cut | None:
    return None if hasattr(t, "placements") else Cut(True)


def cut_of(t: Any, axis: int, start: int, here: int, length: int) -> Cut | None:
    if hasattr(t, "placements"):
        return Cut() if len(t.placements) == 1 and t.placements[0].is_shard(axis) else None
    if t.shape[axis] == here:
        return Cut()
    return Cut(True, axis, start, here) if t.shape[axis] == length else None


def held(t: Any) -> Any:
    return piece_of(t) if hasattr(t, "placements") else t


def sliced(t: Tensor, cut: Cut) -> Tensor:
    return t if cut.length < 0 else t.detach().narrow(cut.axis, cut.start, cut.length)


class Share(torch.autograd.Function):
    """This process's parts of what is whole."""

    @staticmethod
    def forward(ctx: Any, over: Any, cuts: Sequence[Cut], *tensors: Tensor) -> Any:
        ctx.over, ctx.cuts, ctx.shapes = over, cuts, [t.shape for t in tensors]
        return tuple([sliced(t, cut) if cut.length >= 0 else t.view_as(t) for t, cut in zip(tensors, cuts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found: list[Any] = list(grads)
        together: dict[torch.dtype, list[int]] = {}
        for i, (g, wanted) in enumerate(zip(grads, ctx.needs_input_grad[2:], strict=True)):
            if wanted and g is not None:
                together.setdefault(g.dtype, []).append(i)
        for places in together.values():
            flat = torch.cat([full(grads[i], ctx.cuts[i], ctx.shapes[i]).reshape(-1) for i in places])
            flat = all_reduce_sum(flat, ctx.over)
            for i, g in zip(places, flat.split([ctx.shapes[i].numel() for i in places]), strict=True):
                found[i] = g.view(ctx.shapes[i])
        return None, None, *found


def full(g: Tensor, cut: Cut, shape: Any) -> Tensor:
    """The gradient of the whole: zeros where other processes have theirs."""
    if cut.length < 0:
        return g
    whole = g.new_zeros(shape)
    whole.narrow(cut.axis, cut.start, cut.length).copy_(g)
    return whole


def factors(parts: Parts) -> list[Tensor]:
    """A, B and m of this process, through which their gradients find back."""
    found = [t.to_local() if hasattr(t, "placements") else t for t in parts.factors]
    whole = [i for i, cut in enumerate(parts.cuts) if cut.whole]
    shared = eager_apply(Share)(parts.over, [parts.cuts[i] for i in whole], *[found[i] for i in whole])
    for i, t in zip(whole, shared, strict=True):
        found[i] = t
    return found


def linear(parts: Parts, variant: Any, W: Any, x: Any, s: float, bias: Any) -> Tensor | None:
    """This process's rows of y, or its share of their sum; None where x or the bias lie otherwise."""
    from torch.distributed.tensor import Partial

    lies = x.placements[0]
    if not (lies.is_replicate() if parts.rows else lies.is_shard(x.dim() - 1)):
        return None
    if bias is not None:
        if not (parts.rows and hasattr(bias, "placements") and bias.placements[0].is_shard(0)):
            return None
        bias = bias.to_local()
    variant.kept.look_at(W)
    w, a, b = parts.kept()
    c = variant.kept.of(w, w, a, b, s)
    if not parts.rows:
        with torch.no_grad():
            c = all_reduce_sum(c.square(), parts.over).sqrt()
    A, B, m = factors(parts)
    mine = x.to_local(grad_placements=[Partial() if parts.rows else lies])
    return dora_linear(mine, w, A, B, m, s=s, bias=bias, norm=c, keep_inner=variant.keep_inner)
