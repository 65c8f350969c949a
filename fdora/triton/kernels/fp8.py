"""x as e4m3 codes, and the layer's product of such codes with those of W; see fdora/triton/fp8.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import adapter_of
from fdora.triton.kernels.product import finish, products, tile_of_product
from fdora.triton.kernels.tile import Matrix, addresses, block_on, put, vector, within, zeros
from fdora.triton.runtime.cost import ANY_LENGTH, kernel


@triton.jit
def _scale_of(largest):
    """Its reciprocal is finite."""
    return tl.where(largest > 0, tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38), 1.0)


@triton.jit
def _code(v, PTX: tl.constexpr):
    """The bytes of e4m3 for float32 of up to 448, to nearest, ties to even: by one instruction for two, or as that does it."""
    if PTX:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes are multiples of 2^-9, which the sum with 1.5 * 2^23 rounds to
    below = (tl.abs(v) * 512 + 12582912.0).to(tl.int32, bitcast=True) & 15
    code = tl.minimum(tl.where(size < (121 << 23), below, normal), 127)  # of a NaN too
    return (code | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def _columns(x, other, by, factor, k, K, OTHER: tl.constexpr):
    """Of a token, in float32, each times its own factor where there are any. OTHER is "dropped": of those that are zeros in
    ``other``, and zeros; "minus": less ``other``; both times ``factor``."""
    v = vector(x, k, K).to(tl.float32)
    if OTHER == "dropped":
        v = factor * tl.where(vector(other, k, K) == 0, v, 0.0)
    elif OTHER == "minus":
        v = factor * (v - vector(other, k, K).to(tl.float32))
    if by is not None:
        v *= vector(by, k, K)
    return v


@kernel("x other by out scale", **ANY_LENGTH)
def fp8_rows_kernel(
    x, other, by, offsets, out, scale, factor, M, K, G, stride_xm, stride_other,
    OTHER: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, PTX: tl.constexpr,
):
    """A token for each program, which holds BLOCK_K of its columns; the others it reads twice. With ``offsets`` each expert has
    its own ``by``."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x += t * stride_xm
    if offsets is not None:
        by += tl.minimum(adapter_of(t, None, offsets, M, G, BLOCK_G), G - 1).to(tl.int64) * K
    if other is not None:
        other += t * stride_other
    first = _columns(x, other, by, factor, k, K, OTHER)
    largest = tl.abs(first)
    for k0 in range(BLOCK_K, K, BLOCK_K):
        largest = tl.maximum(largest, tl.abs(_columns(x, other, by, factor, k0 + k, K, OTHER)))
    s = _scale_of(tl.max(largest, axis=0))
    tl.store(scale + t, s)
    inverse = tl.div_rn(1.0, s)
    put(_code(first * inverse, PTX), out + t * K, k, K)
    for k0 in range(BLOCK_K, K, BLOCK_K):
        v = _columns(x, other, by, factor, k0 + k, K, OTHER)
        put(_code(v * inverse, PTX), out + t * K + k0, k, K - k0)


@kernel("x other by out scale")
def fp8_blocks_kernel(x, out, scale, M, K, stride_xm, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Some tokens and BLOCK columns for each program; the scales of a column of blocks lie side by side."""
    t, k = block_on(0, BLOCK_M), block_on(1, BLOCK)
    mask = within(t, k, M, K)
    v = tl.load(x + t[:, None].to(tl.int64) * stride_xm + k[None, :], mask=mask, other=0.0).to(tl.float32)
    s = _scale_of(tl.max(tl.abs(v), axis=1))
    put(s, scale + tl.program_id(1).to(tl.int64) * M, t, M)
    tl.store(out + t[:, None].to(tl.int64) * K + k[None, :], _code(v * tl.div_rn(1.0, s)[:, None], PTX), mask=mask)


@kernel("x other by out scale")
def mx_rows_kernel(x, out, scale, M, K, groups, stride_xm, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """The same where 32 columns share an exponent, the least that leaves nothing above 448; those of a token side by side."""
    t, k = block_on(0, BLOCK_M), block_on(1, BLOCK)
    mask = within(t, k, M, K)
    v = tl.load(x + t[:, None].to(tl.int64) * stride_xm + k[None, :], mask=mask, other=0.0).to(tl.float32)
    parts = tl.reshape(v, (BLOCK_M, BLOCK // 32, 32))
    e = (tl.div_rn(tl.max(tl.abs(parts), axis=2), 448.0).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    parts *= ((254 - e) << 23).to(tl.float32, bitcast=True)[:, :, None]
    g = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(scale + t[:, None].to(tl.int64) * groups + g[None, :], e.to(tl.uint8), mask=within(t, g, M, groups))
    code = _code(tl.reshape(parts, (BLOCK_M, BLOCK)), PTX)
    tl.store(out + t[:, None].to(tl.int64) * K + k[None, :], code, mask=mask)


@kernel("codes out")
def turn_kernel(codes, out, N, K, stride_n, stride_k, BLOCK: tl.constexpr):
    """Bytes (N, K) as (K, N), without gaps."""
    n, k = block_on(0, BLOCK), block_on(1, BLOCK)
    v = tl.load(addresses(Matrix(codes, stride_n, stride_k), n, k), mask=within(n, k, N, K))
    tl.store(addresses(Matrix(out, N, None), k, n), v.T, mask=within(k, n, K, N))


@kernel("x x_scale w w_scale h b out pre_scale", "M N K x, M N R h")
def fp8_gemm_kernel(
    x, w, x_scale, w_scale, h, b, out, pre_scale, m, c, bias, M, N, K, R, groups,
    stride_wn, stride_wk, stride_hm, stride_hr, stride_br, stride_bn,
    EPILOGUE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    """Where there is no TMA; with it the product is that of kernels/gemm.py. BK of 32: both have a power of two for 32 columns,
    by which the tensor cores of Blackwell multiply. Of W it is float32."""
    row, col = tile_of_product(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    t, n, k = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at_x, at_w = addresses(Matrix(x, K, None), t, k), addresses(Matrix(w, stride_wk, stride_wn), k, n)
    if BK == 32:
        g = tl.arange(0, BLOCK_K // 32)
        by_x, by_w = addresses(Matrix(x_scale, groups, None), t, g), addresses(Matrix(w_scale, groups, None), n, g)
    acc = zeros(BLOCK_M, BLOCK_N)
    for k0 in range(0, K, BLOCK_K):
        xt = tl.load(at_x, mask=within(t, k, M, K - k0), other=0.0)
        wt = tl.load(at_w, mask=within(k, n, K - k0, N), other=0.0)
        if BK == 32:
            xs = tl.load(by_x, mask=within(t, g, M, groups - k0 // 32), other=0)
            ws = tl.load(by_w, mask=within(n, g, N, groups - k0 // 32), other=0.0)
            acc = tl.dot_scaled(xt, xs, "e4m3", wt, (ws.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), "e4m3", acc)
            by_x += BLOCK_K // 32
            by_w += BLOCK_K // 32
        elif BK:
            acc += tl.dot(xt, wt) * _scale_at(x_scale, w_scale, t, n, k0, M, N, groups, BN, BK)
            x_scale += M
        else:
            acc += tl.dot(xt, wt)
        at_x += BLOCK_K
        at_w += BLOCK_K * stride_wk
    if not BK:
        acc *= _scale_at(x_scale, w_scale, t, n, 0, M, N, groups, BN, 1)
    if h is not None:
        acc = products(acc, Matrix(h, stride_hm, stride_hr), Matrix(b, stride_br, stride_bn), row, col, M, N, R, BLOCK_R)
    finish(acc, (out, pre_scale, None, m, c, bias), row, col, M, N, EPILOGUE)


@triton.jit
def _scale_at(x_scale, w_scale, t, n, k0, M, N, groups, BN: tl.constexpr, BK: tl.constexpr):
    by_n = tl.load(w_scale + (n // BN).to(tl.int64) * groups + k0 // BK, mask=n < N, other=0.0)
    return vector(x_scale, t, M)[:, None] * by_n[None, :]
