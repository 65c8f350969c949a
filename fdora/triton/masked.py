"""Sums over a dropped x: h = s D(x) A^T and dA = dh^T D(x).

A copy of D(x) takes 4 bytes an element to write and 2 to read, twice in a step. Where it leaves the cache the mask is drawn
where x is read, by the kernels of a bank that has this one adapter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fdora._records import Bank
from fdora.triton.copy import gradient
from fdora.triton.dropout import drawn_inside, drop
from fdora.triton.multi_bwd import gradient_of_bank
from fdora.triton.multi_gemm import behind, low_rank_input
from fdora.triton.runtime import Array, Builder, Scalar


def low_rank(
    plan: Builder, x: Array, A: Array, s: Scalar, seed: Array | None, p: float, h: Array, xd: Array | None = None
) -> None:
    """h = s D(x) A^T; x (M, K) and A (r, K) of one dtype. ``xd``: D(x), where something else needs it."""
    if xd is not None or not drawn_inside(x, seed, A.shape[0]):
        plan.product(h, drop(plan, x, seed, p) if xd is None else xd, A.T, s)
        return
    bank = _of_one(A, s, seed, p)
    low_rank_input(plan, x, bank.A, False, bank, behind(A.shape[0]), h, None, dropout="mask")


def gradient_of_A(plan: Builder, dA: Array, dh: Array, x: Array, seed: Array | None, p: float) -> None:
    """dA = dh^T D(x), (r, K) in any dtype."""
    if drawn_inside(x, seed, dA.shape[0]):
        bank = _of_one(dA, None, seed, p)
        gradient_of_bank(plan, bank.A, dh, x, bank, True, masked=True, gain=1 / (1 - p))
    else:
        gradient(plan, dA, dh.T, drop(plan, x, seed, p))


def _of_one(A: Array, s: Scalar | None, seed: Array | None, p: float) -> Any:
    of_one: Any = replace(A, shape=(1, *A.shape), stride=(0, *A.stride))
    return Bank._make((None, of_one, None, None, None, None, s, None, None, None, seed, None, p, False, "lora"))
