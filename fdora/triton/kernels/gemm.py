"""One matrix product with the low-rank term and everything elementwise inside; see fdora/triton/gemm.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.dropout import keep_tile
from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.tile import products
from fdora.triton.runtime.cost import launched


@triton.jit
def tile_of_product(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of a tile; GROUP_M rows of tiles run together, so that their slabs of W meet in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return (group * GROUP_M + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    keep = keep_tile(seed, threshold, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), ORIGIN)
    return tl.where(keep, acc * keep_scale, 0.0)


@triton.jit
def _bias_tile(bias, n, N, HAS_BIAS: tl.constexpr):
    return tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0


@triton.jit
def store_tma(
    acc, out, pre_scale, residual, m, c, bias, row, col, M, N,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr, WIDTH: tl.constexpr,
):
    n = col + tl.arange(0, WIDTH)
    if STORE_PRE_SCALE:
        pre_scale.store([row, col], acc.to(pre_scale.dtype))
    if EPILOGUE == "scale":
        acc = acc * g_tile(m, c, n, N)[None, :] + _bias_tile(bias, n, N, HAS_BIAS)
        if residual is not None:
            acc = acc + residual.load([row, col]).to(tl.float32)
    if EPILOGUE == "residual":
        correction = (g_tile(m, c, n, N) - 1)[None, :] * residual.load([row, col]).to(tl.float32)
        acc = acc + correction + _bias_tile(bias, n, N, HAS_BIAS)
    if EPILOGUE == "accumulate":
        acc = acc + residual.load([row, col]).to(tl.float32)
    if EPILOGUE == "rows":
        t = row + tl.arange(0, acc.shape[0])
        acc = acc * tl.load(m + t, mask=t < M, other=0.0)[:, None]
        if residual is not None:
            acc = acc + residual.load([row, col]).to(tl.float32)
    out.store([row, col], acc.to(out.dtype))


@triton.jit
def store_halves(
    acc, out, pre_scale, residual, m, c, bias, row, col, M, N, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    STORE_PRE_SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Half the tile at a time through shared memory leaves room for one more stage."""
    WIDTH: tl.constexpr = BLOCK_N // 2
    one, two = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
    store_tma(one, out, pre_scale, residual, m, c, bias, row, col, M, N, EPILOGUE, HAS_BIAS, STORE_PRE_SCALE, WIDTH)
    col += WIDTH
    store_tma(two, out, pre_scale, residual, m, c, bias, row, col, M, N, EPILOGUE, HAS_BIAS, STORE_PRE_SCALE, WIDTH)


@triton.jit
def sum_by_tma(
    x, w, h, b, row, col, steps_k, steps_r,
    TRANS_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """x w + h b of one tile, in one loop."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(steps_k + steps_r):
        if i < steps_k:
            left, right, at = x, w, i * BLOCK_K
        else:
            left, right, at = h, b, (i - steps_k) * BLOCK_K
        wt = right.load([col, at]).T if TRANS_B else right.load([at, col])
        acc = tl.dot(left.load([row, at]), wt, acc)
    return acc


@triton.jit(launch_metadata=launched)
def gemm_tma_kernel(
    x, x_masked, w, h, b, out, pre_scale, residual, m, c, bias, seed, threshold, keep_scale, M, N, K, R, PROGRAMS,
    TRANS_B: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr, DROP: tl.constexpr,
    HAS_X_MASKED: tl.constexpr, ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr, FLATTEN: tl.constexpr, GROUP_M: tl.constexpr,
):
    steps_k, steps_r = tl.cdiv(K, BLOCK_K), tl.cdiv(R, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        row, col = tile_of_product(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if EPILOGUE != "accumulate":  # rows that TMA fills up are slow: the last tile begins earlier, over rows of another
            row = tl.minimum(row, tl.maximum(M - BLOCK_M, 0))
        if DROP:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in range(steps_r):
                bt = b.load([col, i * BLOCK_K]).T if TRANS_B else b.load([i * BLOCK_K, col])
                acc = tl.dot(h.load([row, i * BLOCK_K]), bt, acc)
            if HAS_X_MASKED:
                for i in range(steps_k):
                    wt = w.load([col, i * BLOCK_K]).T if TRANS_B else w.load([i * BLOCK_K, col])
                    acc = tl.dot(x_masked.load([row, i * BLOCK_K]), wt, acc)
            acc = _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN, BLOCK_M, BLOCK_N)
            for i in range(steps_k):
                wt = w.load([col, i * BLOCK_K]).T if TRANS_B else w.load([i * BLOCK_K, col])
                acc = tl.dot(x.load([row, i * BLOCK_K]), wt, acc)
        else:
            acc = sum_by_tma(x, w, h, b, row, col, steps_k, steps_r, TRANS_B, BLOCK_M, BLOCK_N, BLOCK_K)
        if EPILOGUE_SUBTILE:
            store_halves(
                acc, out, pre_scale, residual, m, c, bias, row, col, M, N, EPILOGUE, HAS_BIAS, STORE_PRE_SCALE, BLOCK_M, BLOCK_N
            )
        else:
            store_tma(acc, out, pre_scale, residual, m, c, bias, row, col, M, N, EPILOGUE, HAS_BIAS, STORE_PRE_SCALE, BLOCK_N)


@triton.jit(launch_metadata=launched)
def gemm_pointer_kernel(
    x, x_masked, w, h, b, out, pre_scale, residual, m, c, bias, seed, threshold, keep_scale, M, N, K, R,
    stride_xm, stride_xk, stride_wk, stride_wn, stride_hm, stride_hr, stride_br, stride_bn,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr, DROP: tl.constexpr,
    HAS_X_MASKED: tl.constexpr, ORIGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    row, col = tile_of_product(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = products(acc, h, b, row, col, M, N, R, stride_hm, stride_hr, stride_br, stride_bn, BLOCK_M, BLOCK_N, BLOCK_R)
    if HAS_X_MASKED:
        acc = products(
            acc, x_masked, w, row, col, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K
        )
    if DROP:
        acc = _masked(acc, row, col, seed, threshold, keep_scale, ORIGIN, BLOCK_M, BLOCK_N)
    acc = products(acc, x, w, row, col, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K)
    t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    at = t[:, None].to(tl.int64) * N + n[None, :]
    mask = (t < M)[:, None] & (n < N)[None, :]
    if STORE_PRE_SCALE:
        tl.store(pre_scale + at, acc.to(pre_scale.dtype.element_ty), mask=mask)
    if EPILOGUE == "scale":
        acc = acc * g_tile(m, c, n, N)[None, :] + _bias_tile(bias, n, N, HAS_BIAS)
        if residual is not None:
            acc = acc + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE == "residual":
        correction = (g_tile(m, c, n, N) - 1)[None, :] * tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        acc = acc + correction + _bias_tile(bias, n, N, HAS_BIAS)
    if EPILOGUE == "accumulate":
        acc = acc + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE == "rows":
        acc = acc * tl.load(m + t, mask=t < M, other=0.0)[:, None]
        if residual is not None:
            acc = acc + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
