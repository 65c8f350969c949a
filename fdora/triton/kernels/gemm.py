"""One matrix product with the low-rank term and everything elementwise inside; see fdora/triton/gemm.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.dropout import keep_tile
from fdora.triton.kernels.product import TMA, finish, products, tile_of_product
from fdora.triton.kernels.tile import Matrix, halves, zeros
from fdora.triton.runtime.cost import ANY_LENGTH, kernel

LEAST = tl.constexpr(2.0**-80)  # sums of 2^32 in units of the largest scale are finite, and what is lost is below 2^-55


@triton.jit
def _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    keep = keep_tile(seed, threshold, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), ORIGIN)
    return tl.where(keep, acc * keep_scale, 0.0)


@triton.jit
def finish_tma(acc, ends, row, col, M, N, EPILOGUE: tl.constexpr, HALVES: tl.constexpr, STORE: tl.constexpr = TMA):
    """HALVES: half the tile at a time through shared memory leaves room for one more stage."""
    if HALVES:
        one, two = halves(acc)
        finish(one, ends, row, col, M, N, EPILOGUE, STORE)
        finish(two, ends, row, col + one.shape[1], M, N, EPILOGUE, STORE)
    else:
        finish(acc, ends, row, col, M, N, EPILOGUE, STORE)


@triton.jit
def sum_by_tma(
    x, w, h, b, row, col, steps_k, steps_r,
    TRANS_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """x w + h b of one tile, in one loop."""
    acc = zeros(BLOCK_M, BLOCK_N)
    for i in range(steps_k + steps_r):
        if i < steps_k:
            left, right, at = x, w, i * BLOCK_K
        else:
            left, right, at = h, b, (i - steps_k) * BLOCK_K
        wt = right.load([col, at]).T if TRANS_B else right.load([at, col])
        acc = tl.dot(left.load([row, at]), wt, acc)
    return acc


@triton.jit
def _slab(acc, left, right, row, col, at, TRANS_B: tl.constexpr):
    wt = right.load([col, at]).T if TRANS_B else right.load([at, col])
    return tl.dot(left.load([row, at]), wt, acc)


@triton.jit
def slabs(acc, left, right, row, col, steps, TRANS_B: tl.constexpr, BLOCK_K: tl.constexpr):
    for i in range(steps):
        acc = _slab(acc, left, right, row, col, i * BLOCK_K, TRANS_B)
    return acc


@triton.jit
def _low_rank(acc, h, b, row, col, steps, ONE: tl.constexpr, TRANS_B: tl.constexpr, BLOCK_R: tl.constexpr):
    """acc + h b. ONE: in one step, without a loop, which a flattened loop over tiles must not have."""
    return _slab(acc, h, b, row, col, 0, TRANS_B) if ONE else slabs(acc, h, b, row, col, steps, TRANS_B, BLOCK_R)


@triton.jit
def scaled_codes(
    acc, x, w, x_scale, w_scale, row, col, M, N, K, groups,
    BN: tl.constexpr, BK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, down=0, along=0,
    EMPTY: tl.constexpr = True,
):
    """``acc``, all zeros where EMPTY, + x w^T of e4m3 codes times their scales. Where each BLOCK_K columns of x have their own,
    the sum is kept in units of the scale of the next: beside a second sum registers would hold half a tile, and no second
    program. In units of a scale far below others the sum might not be finite, so none counts as less than LEAST of the largest
    before it. W begins at row ``down`` and column ``along`` of w."""
    t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    if BK:
        at_w = w_scale + ((down + col) // BN).to(tl.int64) * groups + along // BK
        scale = tl.maximum(_scale_of(x_scale, at_w, t, t < M), 1e-30)  # never 0: sums are divided by it
        least = scale * LEAST
        if not EMPTY:
            acc /= scale[:, None]
        for k0 in range(0, K, BLOCK_K):
            after = tl.minimum(k0 + BLOCK_K, (K - 1) // BLOCK_K * BLOCK_K)
            following = _scale_of(x_scale + after // BLOCK_K * M, at_w + after // BK, t, t < M)  # on its way meanwhile
            least = tl.maximum(least, following * LEAST)
            following = tl.maximum(following, least)
            acc = tl.dot(x.load([row, k0]), w.load([down + col, along + k0]).T, acc) * (scale / following)[:, None]
            scale = following
        acc *= scale[:, None]
    else:
        if not EMPTY:
            acc /= _unit(x_scale, t, t < M, False)[:, None]
            if w_scale is not None:
                acc /= _unit(w_scale, (down + n) // BN, n < N, False)[None, :]
        for k0 in range(0, K, BLOCK_K):
            acc = tl.dot(x.load([row, k0]), w.load([down + col, along + k0]).T, acc)
        acc *= _unit(x_scale, t, t < M, EMPTY)[:, None]
        if w_scale is not None:
            acc *= _unit(w_scale, (down + n) // BN, n < N, EMPTY)[None, :]
    return acc


@triton.jit
def _unit(scale, at, mask, EMPTY: tl.constexpr):
    """One by which a sum that is not EMPTY is divided, then multiplied, is never 0, as that of a W of zeros may be."""
    found = tl.load(scale + at, mask=mask, other=0.0)
    if not EMPTY:
        found = tl.maximum(found, 1e-30)
    return found


@triton.jit
def _scale_of(by_t, by_n, t, mask):
    return tl.load(by_t + t, mask=mask, other=1.0) * tl.load(by_n)


@kernel("x x_masked w h b out pre_scale residual", "M N K x, M N K x_masked, M N R h", **ANY_LENGTH)
def gemm_tma_kernel(
    x, x_masked, w, x_scale, w_scale, h, b, out, pre_scale, residual, m, c, bias, seed, threshold, keep_scale, p,
    M, N, K, R, groups, PROGRAMS,
    BN: tl.constexpr, BK: tl.constexpr, TRANS_B: tl.constexpr, TRANS_R: tl.constexpr, EPILOGUE: tl.constexpr,
    ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr, FLATTEN: tl.constexpr, ONE_SLAB: tl.constexpr, GROUP_M: tl.constexpr,
):
    MASKED: tl.constexpr = x_scale is not None and seed is not None and h is not None  # by a mask of the low-rank term alone
    steps_k, steps_r = tl.cdiv(K, BLOCK_K), tl.cdiv(R, BLOCK_R)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        row, col = tile_of_product(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if EPILOGUE != "accumulate" and EPILOGUE != "dropped":  # rows that TMA fills up are slow: the last tile begins
            # earlier, over rows of another
            row = tl.minimum(row, tl.maximum(M - BLOCK_M, 0))
        if x_scale is not None:
            acc = zeros(BLOCK_M, BLOCK_N)
            if MASKED:
                acc = _low_rank(acc, h, b, row, col, steps_r, ONE_SLAB, TRANS_R, BLOCK_R)
                acc = _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN, BLOCK_M, BLOCK_N)
            acc = scaled_codes(
                acc, x, w, x_scale, w_scale, row, col, M, N, K, groups, BN, BK, BLOCK_M, BLOCK_N, BLOCK_K, EMPTY=not MASKED
            )
            if not MASKED:
                if seed is not None:  # of what is dropped alone
                    keep = keep_tile(seed, threshold, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), ORIGIN)
                    acc = tl.where(keep, 0.0, acc)
                if h is not None:
                    acc = _low_rank(acc, h, b, row, col, steps_r, ONE_SLAB, TRANS_R, BLOCK_R)
        elif seed is not None:
            acc = zeros(BLOCK_M, BLOCK_N)
            acc = slabs(acc, h, b, row, col, steps_r, TRANS_B, BLOCK_K)
            if x_masked is not None:
                acc = slabs(acc, x_masked, w, row, col, steps_k, TRANS_B, BLOCK_K)
            acc = _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN, BLOCK_M, BLOCK_N)
            acc = slabs(acc, x, w, row, col, steps_k, TRANS_B, BLOCK_K)
        else:
            acc = sum_by_tma(x, w, h, b, row, col, steps_k, steps_r, TRANS_B, BLOCK_M, BLOCK_N, BLOCK_K)
        ends = (out, pre_scale, residual if EPILOGUE != "dropped" else (residual, p), m, c, bias)
        finish_tma(acc, ends, row, col, M, N, EPILOGUE, EPILOGUE_SUBTILE)


@kernel("x x_masked w h b out pre_scale residual", "M N K x, M N K x_masked, M N R h")
def gemm_pointer_kernel(
    x, x_masked, w, h, b, out, pre_scale, residual, m, c, bias, seed, threshold, keep_scale, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_hm, stride_hr, stride_br, stride_bn,
    EPILOGUE: tl.constexpr, ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    row, col = tile_of_product(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    W = Matrix(w, stride_wk, stride_wn)
    acc = zeros(BLOCK_M, BLOCK_N)
    acc = products(acc, Matrix(h, stride_hm, stride_hr), Matrix(b, stride_br, stride_bn), row, col, M, N, R, BLOCK_R)
    if x_masked is not None:
        acc = products(acc, Matrix(x_masked, stride_xm, stride_xk), W, row, col, M, N, K, BLOCK_K)
    if seed is not None:
        acc = _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN, BLOCK_M, BLOCK_N)
    acc = products(acc, Matrix(x, stride_xm, stride_xk), W, row, col, M, N, K, BLOCK_K)
    finish(acc, (out, pre_scale, residual, m, c, bias), row, col, M, N, EPILOGUE)
