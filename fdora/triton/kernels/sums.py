"""Column sums of partials in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import Matrix, addresses, block_on, within
from fdora.triton.runtime.cost import kernel


@triton.jit
def column_sums(partial, n, N, row, strips, BLOCK_T: tl.constexpr):
    """The sums of the columns n of (strips, N), whose rows lie ``row`` apart."""
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros(n.shape, tl.float32)
    for t0 in range(0, strips, BLOCK_T):
        at = addresses(Matrix(partial, row, None), t0 + t, n)
        acc += tl.sum(tl.load(at, mask=within(t0 + t, n, strips, N), other=0.0), axis=0)
    return acc


@kernel("partial out")
def sum_kernel(
    partial,  # (strips, N), or as many of each owner
    out,  # (N,), or the rows of the owners
    N, strips, row,  # the distance of these, or None
    SQRT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):
    if row is not None:
        owner = tl.program_id(1).to(tl.int64)
        partial += owner * strips * N
        out += owner * row
    n = block_on(0, BLOCK_N)
    acc = column_sums(partial, n, N, N, strips, BLOCK_T)
    tl.store(out + n, tl.sqrt_rn(acc) if SQRT else acc, mask=n < N)
