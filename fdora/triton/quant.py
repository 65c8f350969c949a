"""The row norm of W + s B A where W is codes and scales: decoded in registers, no dense W, or a dense W out of the same pass.

A program walks a run of tiles of the same rows, with the codes of the next on their way, and writes one partial sum
per row, which a second kernel adds in a fixed order. What a tile costs to decode, and the roofs: kernels/quant.py.

The number is that of the float32 weights w = value(code) * scale, rounded once. A nested scale is
``code256[code] * scales2 + offset``, rounded twice, as bitsandbytes has it; one in e4m3 is rounded after the global scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdora.quant import QuantSpec
from fdora.triton.codes import Coded, coded_of, facts_of, is_decoded, of_weight, packed, tensors_of, written
from fdora.triton.hash import WORDS
from fdora.triton.norm import guarded_norm, norm
from fdora.triton.op import Likes, maker, planned
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.plan import Array


def quant_norm(W: Coded, tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, squared: bool = False) -> Tensor:
    """c (N,) float32 of W + s B A, or its square."""
    text, numbers = written([W])
    c: Tensor = _row_norm(A, B, list(tensors), s, text, numbers, squared)
    return c


def norm_of_codes(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, squared: bool
) -> Tensor | None:
    """:func:`quant_norm` of a QuantWeight; None where no kernel reads its format."""
    if not is_decoded(spec):
        return None
    return quant_norm(coded_of(spec), tensors_of(tensors), A, B, s, squared)


def norm_of_codes_guarded(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, c: Tensor, old_hash: Tensor
) -> tuple[Tensor, Tensor] | None:
    """c and the fingerprint of A, B, s, as norm_guarded of norm.py has them; None where no kernel reads the format."""
    if (facts := facts_of(spec)) is None:
        return None
    c, new_hash = _row_norm_guarded(A, B, c, old_hash, tensors_of(tensors), s, *facts)
    return c, new_hash


def stack_norms_of_codes(spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float) -> Tensor | None:
    """c (E, N) float32 of a W (E N, K) whose experts are one behind the other, A (E, r, K) and B (E, N, r)."""
    if (facts := facts_of(spec)) is None or (spec.kind == "awq" and B.shape[1] % 8):  # an expert begins within its words
        return None
    c: Tensor = _stack_norms(A, B, tensors_of(tensors), s, *facts)
    return c


@maker(
    "norms of experts of codes",
    "matrix matrix rest",
    "one pass over the codes of each expert, nothing of the size of W written",
)
def plan_stack_norms(plan: Builder, A: Array, B: Array, likes: Likes, coded: Coded) -> None:
    """likes: those of the weight. Two launches for each expert, which share their temporaries."""
    W = packed(plan, likes, coded)
    (E, N, _), s = B.shape, plan.scalar("s")
    c = plan.result("c", (E, N), torch.float32)
    for e in range(E):
        norm(plan, W, A[e], B[e], s, c[e], first=e * N)


@maker("dora_norm of codes", "matrix matrix rest", "one pass over the codes, nothing of the size of W written")
def plan_quant_norm(plan: Builder, A: Array, B: Array, likes: Likes, coded: Coded, squared: bool) -> None:
    W = packed(plan, likes, coded)
    norm(plan, W, A, B, plan.scalar("s"), plan.result("c", W.shape[:1], torch.float32), squared=squared)


@maker(
    "dora_norm of codes where A, B or s changed",
    "matrix matrix vector vector rest",
    "one pass over the codes, or none: the kernels return at once where A, B and s are what they were",
)
def plan_guarded_quant_norm(
    plan: Builder, A: Array, B: Array, before: Array, old_hash: Array, likes: Likes, coded: Coded
) -> None:
    guarded_norm(plan, packed(plan, likes, coded), A, B, plan.scalar("s"), before, old_hash)


quant_stack_norms, _stack_norms = planned(
    "quant_stack_norms",
    "(Tensor A, Tensor B, Tensor[] tensors, float s, str[] text, SymInt[] numbers) -> Tensor",
    of_weight(plan_stack_norms),
    lambda A, B, *_: (B.shape[:2], torch.float32),
)
quant_row_norm_guarded, _row_norm_guarded = planned(
    "quant_row_norm_guarded",
    "(Tensor A, Tensor B, Tensor c, Tensor old_hash, Tensor[] tensors, float s, str[] text, SymInt[] numbers) -> Tensor[]",
    of_weight(plan_guarded_quant_norm),
    lambda A, B, c, *_: [(B.shape[:1], torch.float32), ((WORDS,), torch.int64)],
)
quant_row_norm, _row_norm = planned(
    "quant_row_norm",
    "(Tensor A, Tensor B, Tensor[] tensors, float s, str[] text, SymInt[] numbers, bool squared) -> Tensor",
    of_weight(plan_quant_norm),
    lambda A, B, *_: (B.shape[:1], torch.float32),
)
