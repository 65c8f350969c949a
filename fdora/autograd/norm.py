"""Autograd of the row norm; W and its squared norm are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import NormOf, Onto
from fdora._torch import apply, detached, has_tangents
from fdora.autograd import quant
from fdora.autograd._ops import OPS, Derivative, autocast_off, drop_none, restore_none
from fdora.eager._matmul import is_real as is_real
from fdora.eager.norm import WORDS as WORDS
from fdora.eager.norm import scale as scale
from fdora.eager.norm import smallest_bytes
from fdora.quant import QuantWeight

AnyWeight = Tensor | QuantWeight


def row_norm(of: NormOf, backend: str, detach: bool = True) -> Tensor:
    if not detach:
        return apply(Norm, *of, None, backend)
    of = _constant(of)
    with torch.no_grad(), autocast_off(of.A):
        if isinstance(of.W, QuantWeight):
            return quant.norm(of, False, backend)
        return OPS[backend].norm_fwd(of)


def with_gradient(c: Tensor, W: Tensor, A: Tensor, B: Tensor, s: float, backend: str) -> Tensor:
    """c, which somebody computed from these, with gradients to A and B."""
    return apply(Norm, W, A, B, s, None, None, c.detach(), backend)


def through_norm(
    dc: Tensor, W: Tensor, A: Tensor, B: Tensor, c: Tensor, s: float, needs: tuple[bool, bool], onto: Onto, backend: str
) -> tuple[Tensor | None, Tensor | None]:
    """dA and dB of c, added to ``onto``."""
    found = OPS[backend].norm_bwd(dc, W, A, B, c, s, needs, onto)
    if found is None:
        found = OPS["eager"].norm_bwd(dc, W, A, B, c, s, needs, onto)
        assert found is not None
    return found


def row_sqnorm(of: NormOf, backend: str) -> Tensor:
    of = _constant(of)
    with torch.no_grad(), autocast_off(of.A):
        if isinstance(of.W, QuantWeight):
            return quant.norm(of, True, backend)
        return OPS[backend].sqnorm_fwd(of)


def guarded_norm(of: NormOf, c: Tensor, seen: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    of, (c, seen) = _constant(of), detached(c, seen)
    with torch.no_grad(), autocast_off(of.A):
        if isinstance(of.W, QuantWeight):
            return quant.guarded(of, c, seen, backend)
        return OPS[backend].norm_guarded(of, c, seen)


def _constant(of: NormOf) -> NormOf:
    if not has_tangents():
        return of
    W, A, B, base_sqnorm = detached(of.W, of.A, of.B, of.base_sqnorm)
    return NormOf(W, A, B, of.s, base_sqnorm, of.max_bytes)


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


class Norm(torch.autograd.Function):
    """Keeps W, A, B and c, which is computed where none is given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(W, A, B, s, base_sqnorm, max_bytes, c, backend):
        if c is not None:  # what is returned has to be another tensor; compilers of graphs take no view of an argument
            return c.clone() if torch.compiler.is_compiling() else c.view_as(c)
        with autocast_off(W):
            return OPS[backend].norm_fwd(NormOf(W, A, B, s, base_sqnorm, max_bytes))

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        W, A, B, ctx.s, *_, ctx.backend = inputs
        ctx.save_for_backward(W, A, B, output)

    @staticmethod
    def backward(ctx: Any, dc):
        needs = tuple(ctx.needs_input_grad[1:3])
        dA, dB = restore_none(apply(NormBwd, "dora_norm", dc, *ctx.saved_tensors, ctx.s, needs, ctx.backend), needs)
        #      W     A   B   s     base  bytes c     backend
        return None, dA, dB, None, None, None, None, None


class NormBwd(Derivative):
    @staticmethod
    def forward(fn, dc, W, A, B, c, s, needs, backend):
        with autocast_off(W):
            return drop_none(through_norm(dc, W, A, B, c, s, needs, (None, None), backend))
