"""What every kernel that writes an (M, N) result is made of: its tiles, sums of products, and one end.

What a product ends with is ``ends`` = (out, pre_scale, residual, m, c, bias), each None where it is not there."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.dropout import keep_rows
from fdora.triton.kernels.g import g_of, g_tile
from fdora.triton.kernels.tile import Matrix, addresses, block_on, loaded, put, vector, within, zeros
from fdora.triton.runtime.cost import ANY_LENGTH, kernel
from fdora.triton.runtime.private import INTERPRETED

LOAD = tl.constexpr("ld.global.f32 $0, [$1];")
# Defaults: Triton 3.6 makes no constexpr of a plain string.
SCALE = tl.constexpr("scale")
POINTER = tl.constexpr("pointer")
TMA = tl.constexpr("tma")
PTX = tl.constexpr(not INTERPRETED)


@triton.jit
def tile_of_product(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of a tile; GROUP_M rows of tiles run together, so that their slabs of W meet in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    return (group * GROUP_M + place % height) * BLOCK_M, (place // height) * BLOCK_N


@triton.jit
def products(acc, x, w, row, col, M, N, K, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr = None):
    """acc + x w in the tile that begins at (row, col); x (M, K), w (K, N)."""
    t, n, k = row + tl.arange(0, acc.shape[0]), col + tl.arange(0, acc.shape[1]), tl.arange(0, BLOCK_K)
    at_x, at_w = addresses(x, t, k), addresses(w, k, n)
    for k0 in range(0, K, BLOCK_K):
        xt = tl.load(at_x, mask=within(t, k, M, K - k0), other=0.0)
        wt = tl.load(at_w, mask=within(k, n, K - k0, N), other=0.0)
        acc = tl.dot(xt, wt.to(xt.dtype), acc, input_precision=PRECISION)
        at_x += BLOCK_K * x.col
        at_w += BLOCK_K * w.row
    return acc


@triton.jit
def over_tokens(u, v, p, q, begin, end, P, Q, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr = None, mask=None):
    """u^T v at the columns p of u and q of v, over tokens from ``begin`` to ``end``; u (M, P), v (M, Q). ``mask`` of v:
    its seed, threshold, and the token that counts as the first."""
    acc = zeros(p.shape[0], q.shape[0])
    for t0 in range(begin, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        ut, vt = loaded(u, t, p, end, P), loaded(v, t, q, end, Q)
        if mask is not None:
            vt = tl.where(keep_rows(mask[0], mask[1], t - mask[2], q), vt, 0.0)
        acc = tl.dot(tl.trans(ut), vt, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _g_of_rows(g, ids, t, n, M, N, STORE: tl.constexpr):
    """(G, N) g of the adapter of each row t."""
    a = vector(ids, t, M).to(tl.int64)
    at = g + a[:, None] * N + tl.minimum(n, N - 1)[None, :]
    if PTX and STORE != "pointer":  # a load would want the product in a layout of its own, by shared memory that is full
        found = tl.inline_asm_elementwise(LOAD, "=f,l", [at.to(tl.int64)], tl.float32, True, 1)
    else:
        found = tl.load(at)
    return found


@triton.jit
def by_segments(acc, g, segments, t, n, M, N, STORE: tl.constexpr = POINTER):
    """(G, N) g of each row's segment. ``segments`` = (ids of the rows, first and last of the tile)."""
    ids, first, last = segments
    if ids is None or first == last:
        acc = acc * vector(g + tl.cast(first, tl.int64) * N, n, N)[None, :]
    else:
        acc = acc * _g_of_rows(g, ids, t, n, M, N, STORE)
    return acc


@triton.jit
def _read(src, row, col, at, mask, STORE: tl.constexpr):
    return tl.load(src + at, mask=mask, other=0.0) if STORE == "pointer" else src.load([row, col])


@triton.jit
def _write(to, v, row, col, at, mask, M, N, STORE: tl.constexpr):
    if STORE == "pointer":
        tl.store(to + at, v.to(to.dtype.element_ty), mask=mask)
    elif STORE == "tma":
        to.store([row, col], v.to(to.dtype))
    elif row + v.shape[0] > M:  # few tiles: addresses of these alone, which no other has to hold
        t, n = row + tl.arange(0, v.shape[0]), col + tl.arange(0, v.shape[1])
        at = t[:, None].to(tl.int64) * N + n[None, :]
        tl.store(to[1] + at, v.to(to[0].dtype), mask=within(t, n, M, N))
    else:
        to[0].store([row, col], v.to(to[0].dtype))


@triton.jit
def finish(
    acc, ends, row, col, M, N, EPILOGUE: tl.constexpr = SCALE, STORE: tl.constexpr = POINTER, ACROSS: tl.constexpr = 0
):
    """The tile of a result that begins at (row, col): to ``pre_scale`` as it is, and to ``out`` with g, bias and residual.

    EPILOGUE   "scale" by g = m / c, where m is there; "normed": c is a pair, where the norms go and their squares;
               "residual": (g - 1) residual is added; "dropped": (g - 1) v is, v = (acc - p residual) / (1 - p), which goes to
               ``pre_scale``; ``residual`` is a pair of it and p; "rows": m has one for each row; "segments": m is g, c as in
               by_segments;
               "table": m is g of each adapter, c has the adapter of each row
    STORE      "pointer" | "tma": out, pre_scale and residual are tensor descriptors | "rows": out and pre_scale are pairs of a
               descriptor and a pointer, by which a tile is written that ends behind row M, where others begin
    ACROSS     1: acc is (columns, rows)
    """
    out, pre_scale, residual, m, c, bias = ends
    t, n = row + tl.arange(0, acc.shape[ACROSS]), col + tl.arange(0, acc.shape[1 - ACROSS])
    at = tl.expand_dims(t, 1 - ACROSS).to(tl.int64) * N + tl.expand_dims(n, ACROSS)
    mask = tl.expand_dims(t < M, 1 - ACROSS) & tl.expand_dims(n < N, ACROSS)
    if EPILOGUE == "dropped":
        v = (acc - residual[1] * _read(residual[0], row, col, at, mask, STORE).to(tl.float32)) / (1 - residual[1])
        if pre_scale is not None:
            _write(pre_scale, v, row, col, at, mask, M, N, STORE)
        acc += tl.expand_dims(g_tile(m, c, n, N) - 1, ACROSS) * v
    elif pre_scale is not None:
        _write(pre_scale, acc, row, col, at, mask, M, N, STORE)
    if m is not None and EPILOGUE != "dropped":
        if EPILOGUE == "segments":
            acc = by_segments(acc, m, c, t, n, M, N, STORE)
        elif EPILOGUE == "table":
            acc = acc * _g_of_rows(m, c, t, n, M, N, STORE)
        elif EPILOGUE == "rows":
            acc = acc * vector(m, t, M)[:, None]
        else:
            if EPILOGUE == "normed":
                norm = tl.sqrt_rn(c[1])
                put(norm, c[0], n, N)
                g = g_of(m, norm, n, N)
            else:
                g = g_tile(m, c, n, N)
            if EPILOGUE == "residual":
                acc = acc + tl.expand_dims(g - 1, ACROSS) * _read(residual, row, col, at, mask, STORE).to(tl.float32)
            else:
                acc = acc * tl.expand_dims(g, ACROSS)
    if bias is not None:
        acc += tl.expand_dims(vector(bias, n, N).to(tl.float32), ACROSS)
    if residual is not None and EPILOGUE != "residual" and EPILOGUE != "dropped":  # may be ``out``: nobody else has this tile
        acc += _read(residual, row, col, at, mask, STORE).to(tl.float32)
    _write(out, acc, row, col, at, mask, M, N, STORE)


@kernel("base h b out pre_scale", "M N R base", **ANY_LENGTH)
def rest_kernel(
    base, h, b, out, pre_scale, m, c, bias, M, N, R, stride_hm, stride_hr, stride_br, stride_bn,
    EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    """(M, N) base, (M, R) h, (R, N) b -> g (base + h b) + bias. ``out`` or ``pre_scale`` may be ``base``."""
    row, col = tile_of_product(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    at = t[:, None].to(tl.int64) * N + n[None, :]
    there = tl.load(base + at, mask=within(t, n, M, N), other=0.0)  # on its way while the product runs
    acc = zeros(BLOCK_M, BLOCK_N)
    acc = products(acc, Matrix(h, stride_hm, stride_hr), Matrix(b, stride_br, stride_bn), row, col, M, N, R, BLOCK_R)
    finish(acc + there.to(tl.float32), (out, pre_scale, None, m, c, bias), row, col, M, N, EPILOGUE)


@kernel("v residual out")
def epilogue_kernel(
    v, residual, out, m, c, bias, M, N,
    EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """g and bias on a float32 product; here the residual is added before the bias."""
    t, n = block_on(0, BLOCK_M), block_on(1, BLOCK_N)
    at, mask = t[:, None].to(tl.int64) * N + n[None, :], within(t, n, M, N)
    y = tl.load(v + at, mask=mask)
    if EPILOGUE == "scale":
        y = g_tile(m, c, n, N)[None, :] * y
        if residual is not None:
            y += tl.load(residual + at, mask=mask)
    if EPILOGUE == "residual":
        y = y + (g_tile(m, c, n, N) - 1)[None, :] * tl.load(residual + at, mask=mask)
    if bias is not None:
        y += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)
