"""Up to four matrices below each other, in one dtype: the factors of layers that share a product."""

from __future__ import annotations

import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.tile import Matrix, addresses, block_on, store, within
from fdora.triton.runtime.cost import kernel


@kernel("src0 src1 src2 src3 out")
def copy_kernel(
    src0, src1, src2, src3, out, rows0, rows1, rows2, rows3, columns, stride_out,
    stride_m0, stride_n0, stride_m1, stride_n1, stride_m2, stride_n2, stride_m3, stride_n3,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Axis 1 of the grid walks over all blocks of rows of all matrices, one matrix after the other."""
    n, i, at = block_on(0, BLOCK_N), tl.program_id(1), 0
    sources = (
        (Matrix(src0, stride_m0, stride_n0), rows0), (Matrix(src1, stride_m1, stride_n1), rows1),
        (Matrix(src2, stride_m2, stride_n2), rows2), (Matrix(src3, stride_m3, stride_n3), rows3),
    )
    for k in tl.static_range(COUNT):
        src, rows = sources[k]
        if (i >= 0) & (i < tl.cdiv(rows, BLOCK_M)):
            m = i * BLOCK_M + tl.arange(0, BLOCK_M)
            mask = within(m, n, rows, columns)
            v = tl.load(addresses(src, m, n), mask=mask)
            tl.store(addresses(Matrix(out, stride_out, None), at + m, n), v.to(out.dtype.element_ty), mask=mask)
        i -= tl.cdiv(rows, BLOCK_M)
        at += rows


@kernel("t out")
def by_g_kernel(
    t, out, m, c, N, K, stride_n, stride_k, stride_out, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """g t, row by row; ``out`` may be t."""
    n, k = block_on(0, BLOCK_N), block_on(1, BLOCK_K)
    v = tl.load(addresses(Matrix(t, stride_n, stride_k), n, k), mask=within(n, k, N, K)).to(tl.float32)
    store(v * g_tile(m, c, n, N)[:, None], Matrix(out, stride_out, None), n, k, N, K)
