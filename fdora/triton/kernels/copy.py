"""Up to four matrices below each other, in one dtype: the factors of layers that share a product."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.tile import Matrix, addresses, block_on, store, within
from fdora.triton.runtime.cost import launched


@triton.jit
def _block(src, out, at, row, col, rows, columns, stride_m, stride_n, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    v = tl.load(src + m[:, None].to(tl.int64) * stride_m + n[None, :].to(tl.int64) * stride_n, mask=mask)
    to = out + (at + m)[:, None].to(tl.int64) * stride_out + n[None, :]
    tl.store(to, v.to(out.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=launched)
def copy_kernel(
    src0, src1, src2, src3, out, rows0, rows1, rows2, rows3, columns, stride_out,
    stride_m0, stride_n0, stride_m1, stride_n1, stride_m2, stride_n2, stride_m3, stride_n3,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Axis 1 of the grid walks over all blocks of rows of all matrices, one matrix after the other."""
    col, i = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    n0, n1, n2 = tl.cdiv(rows0, BLOCK_M), tl.cdiv(rows1, BLOCK_M), tl.cdiv(rows2, BLOCK_M)
    if i < n0:
        _block(src0, out, 0, i * BLOCK_M, col, rows0, columns, stride_m0, stride_n0, stride_out, BLOCK_M, BLOCK_N)
    if COUNT > 1:  # noqa: SIM102  one condition is for the compiler, the other for the program
        if (i >= n0) & (i < n0 + n1):
            _block(
                src1, out, rows0, (i - n0) * BLOCK_M, col, rows1, columns, stride_m1, stride_n1, stride_out, BLOCK_M, BLOCK_N
            )
    if COUNT > 2:  # noqa: SIM102
        if (i >= n0 + n1) & (i < n0 + n1 + n2):
            row = (i - n0 - n1) * BLOCK_M
            _block(src2, out, rows0 + rows1, row, col, rows2, columns, stride_m2, stride_n2, stride_out, BLOCK_M, BLOCK_N)
    if COUNT > 3:  # noqa: SIM102
        if i >= n0 + n1 + n2:
            row, at = (i - n0 - n1 - n2) * BLOCK_M, rows0 + rows1 + rows2
            _block(src3, out, at, row, col, rows3, columns, stride_m3, stride_n3, stride_out, BLOCK_M, BLOCK_N)


@triton.jit(launch_metadata=launched)
def by_g_kernel(
    t, out, m, c, N, K, stride_n, stride_k, stride_out, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """g t, row by row; ``out`` may be t."""
    n, k = block_on(0, BLOCK_N), block_on(1, BLOCK_K)
    v = tl.load(addresses(Matrix(t, stride_n, stride_k), n, k), mask=within(n, k, N, K)).to(tl.float32)
    store(v * g_tile(m, c, n, N)[:, None], Matrix(out, stride_out, None), n, k, N, K)
