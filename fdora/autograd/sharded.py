"""The row norm of a weight whose columns are spread over processes: squares are added up over them, then the root.

Every process adds up in every call. One that skipped it, because *its* A and B did not change, would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import NormOf
from fdora._torch import all_reduce_sum, apply
from fdora.autograd._ops import OPS, autocast_off, restore_none
from fdora.autograd.norm import NormBwd, guarded_norm, row_sqnorm

Groups = Sequence[Any]
"""What the squares are added up over, one after the other: process groups, 1-D meshes, pairs of a mesh and its dimension."""


def sharded_norm(of: NormOf, groups: Groups, backend: str, detach: bool = True, sum_gradient: bool = False) -> Tensor:
    """c of the whole rows from this process's columns of W and A.

    ``sum_gradient``: the gradient that reaches c is this process's share of it, to be added up in backward. A gets the gradient
    of these columns, B this process's share of its own.
    """
    if not detach:
        c: Tensor = apply(ShardedNorm, *of, groups, sum_gradient, backend)
        return c
    return root_of_sum(row_sqnorm(of, backend), groups)


def sharded_guarded_norm(of: NormOf, part: Tensor, seen: Tensor, groups: Groups, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """c of the whole rows, the fingerprint, and the norm of these columns: the given one where the fingerprint matches."""
    part, now = guarded_norm(of, part, seen, backend)
    return root_of_sum(part.square(), groups), now, part


def root_of_sum(squares: Tensor, groups: Groups) -> Tensor:
    """Of what each process has."""
    with torch.no_grad():
        for group in groups:
            squares = all_reduce_sum(squares, group)
        return squares.sqrt()


class ShardedNorm(torch.autograd.Function):
    """Keeps W, A, B and c. With v = W + s B A of these columns and c of all of them, dv = (dc / c) v as for a whole row."""

    @staticmethod
    def forward(ctx: Any, W, A, B, s, base_sqnorm, max_bytes, groups, sum_gradient, backend):
        with autocast_off(W):
            c = root_of_sum(OPS[backend].sqnorm_fwd(NormOf(W, A, B, s, base_sqnorm, max_bytes)), groups)
        ctx.s, ctx.groups, ctx.backend = s, groups if sum_gradient else (), backend
        ctx.save_for_backward(W, A, B, c)
        return c

    @staticmethod
    def backward(ctx: Any, dc):
        for group in ctx.groups:
            dc = all_reduce_sum(dc, group)
        needs = tuple(ctx.needs_input_grad[1:3])
        dA, dB = restore_none(apply(NormBwd, "dora_norm", dc, *ctx.saved_tensors, ctx.s, needs, ctx.backend), needs)
        #      W     A   B   s     base  bytes groups sum  backend
        return None, dA, dB, None, None, None, None, None, None
