"""The second stage of every sum over rows or columns: partials added in the same order every time."""

from __future__ import annotations

from fdora.triton.hash import Guard
from fdora.triton.kernels.norm import choose_kernel
from fdora.triton.kernels.sums import sum_kernel
from fdora.triton.runtime import Array, Builder, cdiv

SUM_N, SUM_T = 32, 32
TILE = {"BLOCK_N": SUM_N, "BLOCK_T": SUM_T}


def column_sums(plan: Builder, partial: Array, out: Array, sqrt: bool = False) -> None:
    """(strips, N) float32 -> (N,), or (G, strips, N) -> (G, N); optionally the root."""
    *owners, strips, N = partial.shape
    given = {"partial": partial, "out": out, "N": N, "strips": strips, "row": out.stride[0] if owners else None, "SQRT": sqrt}
    plan.launch(sum_kernel, (cdiv(N, SUM_N), *owners), given, TILE)


def chosen(plan: Builder, partial: Array, out: Array, guard: Guard) -> None:
    """The root of the sums, or the norm of before."""
    strips, N = partial.shape
    plan.launch(choose_kernel, "N", {"partial": partial, "out": out, "N": N, "strips": strips}, guard, TILE, pdl=plan.pdl)
