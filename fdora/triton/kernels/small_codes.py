"""The layer for a handful of tokens, straight from codes, in one launch or in parts of K; see fdora/triton/small_quant.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.decode import Codes
from fdora.triton.kernels.product import finish
from fdora.triton.kernels.small import low_rank_term
from fdora.triton.kernels.small_quant import Tile, bytes8, fours, in_halves, ints
from fdora.triton.kernels.tile import Matrix, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def _product(x, W, col, begin, end, M, N, K, HOW: tl.constexpr, T: tl.constexpr):
    """Columns of the result from ``col`` on, terms from ``begin`` to ``end``: (BLOCK_N, BLOCK_M)."""
    PRODUCT: tl.constexpr = ints if HOW.SCALES == "group" else bytes8 if HOW.BITS == 8 else fours
    return PRODUCT(x, W, col, begin, end, M, N, K, HOW, T)


@kernel("x codes scales scales2 out part h b", "M N K x, M N R x?b")
def codes_parts_kernel(
    x, codes, scales, code256, scales2, offset, out, part, h, b, s, M, N, K, R, groups,
    stride_xm, stride_xk, stride_cn, stride_ck, stride_br, stride_bn, stride_hm,
    HOW: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HALVES: tl.constexpr, PDL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, SLICES: tl.constexpr,
):
    """x w in parts of whole steps: out is (parts, M, N) float32. With PARTS, of h, part 1 is h b: begun neither first,
    when h is not there yet, nor last, when nothing else is left to do."""
    if PDL:
        gdc_launch_dependents()
    STEP: tl.constexpr = SLICES * BLOCK_K
    LOW: tl.constexpr = 1 if PARTS else 0
    span = tl.cdiv(tl.cdiv(K, STEP), tl.num_programs(1) - LOW) * STEP  # its divisor is seen: loads of 16 bytes
    part_of_K = max(tl.program_id(1) - LOW, 0)
    col, begin = tl.program_id(0) * BLOCK_N, part_of_K * span
    end = min(begin + span, K)
    if PARTS and tl.program_id(1) == 1:
        if PDL:
            gdc_wait()
        acc = low_rank_term(
            zeros(BLOCK_N, BLOCK_M), None, part, Matrix(h, stride_hm, None), Matrix(b, stride_br, stride_bn),
            None, None, s, col, M, N, R, x.dtype.element_ty, PARTS, BLOCK_R, 2, 1,
        )
        n = col + tl.arange(0, BLOCK_N)
    else:
        W = Codes(codes, scales, code256, scales2, offset, groups, stride_cn, stride_ck)
        acc = _product(
            Matrix(x, stride_xm, stride_xk), W, col, begin, end, M, N, K, HOW,
            Tile(BLOCK_M, BLOCK_N, BLOCK_K, SLICES, COLUMNS, EVEN),
        )
        n = tl.arange(0, BLOCK_N)
        n = in_halves(col, n, BLOCK_N, N, EVEN) if HALVES else col + n
    if PDL:  # what is written here may be another's until the kernel ahead has ended
        gdc_wait()
    t = tl.arange(0, BLOCK_M)
    at = (tl.program_id(1) * M + t)[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, acc, mask=within(n, t, N, M))


@kernel("x codes scales scales2 part h b out pre_scale u dA", "M N K x, M N R x, M N R u")
def small_codes_kernel(
    x, codes, scales, code256, scales2, offset, part, h, b, out, pre_scale, m, c, bias, u, dA, s, M, N, K, R, groups,
    stride_xm, stride_xk, stride_cn, stride_ck, stride_br, stride_bn, stride_hm, stride_um, stride_un,
    HOW: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, SLICES: tl.constexpr,
):
    """small_kernel, for W of codes. ``COLUMNS``: y has the columns of W, and K counts its rows (backward)."""
    W, col = Codes(codes, scales, code256, scales2, offset, groups, stride_cn, stride_ck), tl.program_id(0) * BLOCK_N
    acc = _product(
        Matrix(x, stride_xm, stride_xk), W, col, 0, K, M, N, K, HOW, Tile(BLOCK_M, BLOCK_N, BLOCK_K, SLICES, COLUMNS, EVEN)
    )
    if PDL:
        gdc_wait()
    acc = low_rank_term(
        acc, None, part, Matrix(h, stride_hm, None), Matrix(b, stride_br, stride_bn), Matrix(u, stride_um, stride_un), dA, s,
        col, M, N, R, x.dtype.element_ty, PARTS, BLOCK_R, 1 if PARTS > 2 else 2, 1,
    )
    finish(acc, (out, pre_scale, out if ACCUMULATE else None, m, c, bias), 0, col, M, N, ACROSS=1)
