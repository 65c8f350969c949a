"""The second stage of every sum over rows or columns: partials added in the same order every time."""

from __future__ import annotations

from fdora.triton.kernels.sums import sum_kernel
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array

SUM_N, SUM_T = 32, 32


def column_sums(plan: Builder, partial: Array, out: Array, sqrt: bool = False) -> None:
    """(strips, N) float32 -> (N,); optionally the root."""
    strips, N = partial.shape
    plan.launch(
        sum_kernel,
        (cdiv(N, SUM_N),),
        {"partial": partial, "out": out, "N": N, "strips": strips, "SQRT": sqrt, "BLOCK_N": SUM_N, "BLOCK_T": SUM_T},
    )
