"""The row norm of W + s B A where W is codes and scales: decoded in registers, no dense W, or a dense W out of the same pass.

A program walks a run of tiles of the same rows, with the codes of the next on their way, and writes one partial sum
per row, which a second kernel adds in a fixed order. What a tile costs to decode, and the roofs: kernels/quant.py.

The number is that of the float32 weights w = value(code) * scale, rounded once. A nested scale is
``code256[code] * scales2 + offset``, rounded twice, as bitsandbytes has it; one in e4m3 is rounded after the global scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora.quant import QuantSpec
from fdora.triton.codes import facts_of, packed, tensors_of, weights_of
from fdora.triton.norm import guarded_forms, guarded_norm, norm
from fdora.triton.op import Likes, planned
from fdora.triton.runtime import Array, Builder


def norm_of_codes(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, squared: bool
) -> Tensor | None:
    """c (N,) float32 of W + s B A, or its square; None where no kernel reads the format."""
    if (facts := facts_of(spec)) is None:
        return None
    c: Tensor = plan_quant_norm.call(A, B, tensors_of(tensors), s, *facts, squared)
    return c


def norm_of_codes_guarded(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, c: Tensor, old_hash: Tensor
) -> tuple[Tensor, Tensor] | None:
    """c and the fingerprint of A, B, s, as norm_guarded of norm.py has them; None where no kernel reads the format."""
    if (facts := facts_of(spec)) is None:
        return None
    c, new_hash = plan_guarded_quant_norm.call(A, B, c, old_hash, tensors_of(tensors), s, *facts)
    return c, new_hash


def stack_norms_of_codes(spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float) -> Tensor | None:
    """c (E, N) float32 of a W (E N, K) whose experts are one behind the other, A (E, r, K) and B (E, N, r)."""
    if (facts := facts_of(spec)) is None or (spec.kind == "awq" and B.shape[1] % 8):  # an expert begins within its words
        return None
    c: Tensor = plan_stack_norms.call(A, B, tensors_of(tensors), s, *facts)
    return c


@planned(
    "quant_stack_norms(Tensor A, Tensor B, Tensor[] tensors, float s, str[] text, SymInt[] numbers) -> Tensor",
    "norms of experts of codes",
    "matrix matrix rest",
    lambda A, B, *_: {"c": (B.shape[:2], torch.float32)},
    "one pass over the codes of each expert, nothing of the size of W written",
)
def plan_stack_norms(plan: Builder, A: Array, B: Array, likes: Likes, *coded: Any) -> None:
    """likes: those of the weight. Two launches for each expert, which share their temporaries."""
    W = packed(plan, likes, *weights_of(*coded))
    (E, N, _), s, (c,) = B.shape, plan.scalar("s"), plan.wanted()
    for e in range(E):
        norm(plan, W, A[e], B[e], s, c[e], first=e * N)


@planned(
    "quant_row_norm(Tensor A, Tensor B, Tensor[] tensors, float s, str[] text, SymInt[] numbers, bool squared) -> Tensor",
    "dora_norm of codes",
    "matrix matrix rest",
    lambda A, B, *_: {"c": (B.shape[:1], torch.float32)},
    "one pass over the codes, nothing of the size of W written",
)
def plan_quant_norm(
    plan: Builder, A: Array, B: Array, likes: Likes, text: Sequence[str], numbers: Sequence[int], squared: bool
) -> None:
    W, s, (c,) = packed(plan, likes, *weights_of(text, numbers)), plan.scalar("s"), plan.wanted()
    norm(plan, W, A, B, s, c, squared=squared)


@planned(
    "quant_row_norm_guarded(Tensor A, Tensor B, Tensor c, Tensor old_hash, Tensor[] tensors, float s, str[] text, "
    "SymInt[] numbers) -> Tensor[]",
    "dora_norm of codes where A, B or s changed",
    "matrix matrix vector vector rest",
    lambda A, B, *_: guarded_forms(B.shape[0]),
    "one pass over the codes, or none: the kernels return at once where A, B and s are what they were",
)
def plan_guarded_quant_norm(
    plan: Builder, A: Array, B: Array, before: Array, old_hash: Array, likes: Likes, *coded: Any
) -> None:
    guarded_norm(plan, packed(plan, likes, *weights_of(*coded)), A, B, plan.scalar("s"), before, old_hash)
