"""Autograd of the row norm; W and its squared norm are frozen.

The columns of a weight may be spread over processes: squares are added up over them, then the root. Every process adds up in
every call. One that skipped it, because *its* A and B did not change, would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdora._records import NormOf
from fdora._torch import all_reduce_sum, apply, detached, has_tangents
from fdora.autograd import quant
from fdora.autograd._ops import OPS, autocast_off, gradients_of
from fdora.eager._matmul import is_real as is_real
from fdora.eager.norm import WORDS as WORDS
from fdora.eager.norm import scale as scale
from fdora.eager.norm import smallest_bytes
from fdora.eager.tree import OneByOne
from fdora.quant import QuantWeight
from fdora.quant.codes8 import in_trees

AnyWeight = Tensor | QuantWeight


def row_norm(of: NormOf, backend: str, detach: bool = True) -> Tensor:
    return _as_constants("norm_fwd", of, backend) if detach else apply(Norm, *of, None, (), False, backend)


def with_gradient(c: Tensor, W: Tensor, A: Tensor, B: Tensor, s: float, backend: str) -> Tensor:
    """c, which somebody computed from these, with gradients to A and B."""
    return apply(Norm, W, A, B, s, None, None, c.detach(), (), False, backend)


def through_norm(*given: Any) -> tuple[Tensor | None, Tensor | None]:
    """dA and dB of c; the arguments of norm_bwd, and the backend."""
    *of, backend = given
    return OPS[backend].norm_bwd(*of) or OPS["eager"].norm_bwd(*of)


def row_sqnorm(of: NormOf, backend: str) -> Tensor:
    return _as_constants("sqnorm_fwd", of, backend)


def guarded_norm(of: NormOf, c: Tensor, seen: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return _as_constants("norm_guarded", of, backend, c, seen)


def _as_constants(op: str, of: NormOf, backend: str, *more: Tensor) -> Any:
    """An op of the backend, or for a quantised weight that of quant.py, of what no derivative sees."""
    if has_tangents():
        W, A, B, base_sqnorm, *more = detached(of.W, of.A, of.B, of.base_sqnorm, *more)  # type: ignore[assignment]
        of = NormOf(W, A, B, of.s, base_sqnorm, of.max_bytes)
    with torch.no_grad(), autocast_off(of.A):
        if isinstance(of.W, QuantWeight):
            return getattr(quant, op)(of, *more, backend=backend)
        return getattr(OPS[backend], op)(of, *more)


def tree_layers(
    W: Sequence[Any], A: Sequence[Tensor], B: Sequence[Tensor], s: Sequence[float], at: Sequence[int], backend: str
) -> Any:
    """Some layers of a tree: in few launches where the backend reads all of their weights, else one after the other."""
    coded = [w for w in W if isinstance(w, QuantWeight)]
    if not coded or (backend == "triton" and all(map(in_trees, coded))):
        return OPS[backend].TreeLayers(W, A, B, s, at)
    return OneByOne(s, at, partial(row_norm, backend=backend), partial(guarded_norm, backend=backend))


def kept_norms(layers: Sequence[tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor]]) -> Sequence[Tensor]:
    """:func:`guarded_norm` of each (W, A, B, s, c, seen) by kernels in compiled code, in one op: c and seen, which nobody else
    holds, are written in place."""
    kernels = OPS["triton"].norms_of_kept
    assert kernels is not None
    with torch.no_grad(), autocast_off(layers[0][0]):
        return kernels(layers)


def base_sqnorm(W: AnyWeight, max_bytes: int | None, backend: str) -> Tensor:
    (W,) = detached(W)
    with torch.no_grad():
        if isinstance(W, QuantWeight):
            return quant.base_sqnorm(W, max_bytes, backend)
    with torch.no_grad(), autocast_off(W):
        return OPS[backend].base_sqnorm(W, max_bytes)


def smallest_bytes_of(W: AnyWeight, A: Tensor, B: Tensor, factored: bool) -> int:
    return quant.smallest_bytes(W, A, B, factored) if isinstance(W, QuantWeight) else smallest_bytes(W, A, B, factored)


Groups = Sequence[Any]
"""What the squares are added up over, one after the other: process groups, 1-D meshes, pairs of a mesh and its dimension."""


def sharded_norm(of: NormOf, groups: Groups, backend: str, detach: bool = True, sum_gradient: bool = False) -> Tensor:
    """c of the whole rows from this process's columns of W and A.

    ``sum_gradient``: the gradient that reaches c is this process's share of it, to be added up in backward. A gets the gradient
    of these columns, B this process's share of its own.
    """
    if not detach:
        return apply(Norm, *of, None, groups, sum_gradient, backend)
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


class Norm(torch.autograd.Function):
    """Keeps W, A, B and c, which is computed where none is given. With v = W + s B A of these columns and c of all of them,
    dv = (dc / c) v as for a whole row."""

    generate_vmap_rule = True

    @staticmethod
    def forward(W, A, B, s, base_sqnorm, max_bytes, c, groups, sum_gradient, backend):
        if c is not None:  # what is returned has to be another tensor; compilers of graphs take no view of an argument
            return c.clone() if torch.compiler.is_compiling() else c.view_as(c)
        ops, of = OPS[backend], NormOf(W, A, B, s, base_sqnorm, max_bytes)
        with autocast_off(W):
            return root_of_sum(ops.sqnorm_fwd(of), groups) if groups else ops.norm_fwd(of)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        W, A, B, ctx.s, _, _, _, groups, sum_gradient, ctx.backend = inputs
        ctx.groups = groups if sum_gradient else ()
        ctx.save_for_backward(W, A, B, output)

    @staticmethod
    def backward(ctx: Any, dc):
        for group in ctx.groups:
            dc = all_reduce_sum(dc, group)
        needs = ctx.needs_input_grad[1:3]
        rest = (*ctx.saved_tensors, ctx.s, needs, ctx.backend)
        dA, dB = gradients_of("dora_norm", needs, through_norm, dc, *rest)
        #      W     A   B   s     base  bytes c     groups sum  backend
        return None, dA, dB, None, None, None, None, None, None, None
