"""x as e4m3 codes, and the layer's product of such codes with those of W; see fdora/triton/fp8.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.dropout import keep_keyed, key_of
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
    return _nearest(v, 3, 7, 127)


@triton.jit
def _nearest(v, BITS: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    """The same of any small format: so many bits of fraction, the bias of its exponent, and its last code, a NaN's too."""
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    last: tl.constexpr = 23 - BITS
    normal = ((size + ((1 << (last - 1)) - 1) + ((size >> last) & 1)) >> last) - ((127 - BIAS) << BITS)
    # below the least normal number codes are multiples of one step, to which the sum with 1.5 * 2^23 rounds
    steps = tl.abs(v) * (1 << (BIAS - 1 + BITS)) + 12582912.0
    below = steps.to(tl.int32, bitcast=True) & ((2 << BITS) - 1)
    code = tl.minimum(tl.where(size < ((128 - BIAS) << 23), below, normal), MOST)
    return (code + tl.where(bits < 0, MOST + 1, 0)).to(tl.uint8)


@triton.jit
def _columns(x, other, by, factor, key, threshold, k, K, OTHER: tl.constexpr):
    """Of a token, in float32, each times its own factor where there are any. OTHER is "dropped": of those that are zeros in
    ``other``, and zeros; "masked": of those that dropout drops; "minus": less ``other``; all three times ``factor``."""
    v = vector(x, k, K).to(tl.float32)
    if OTHER == "masked":
        v = factor * tl.where(keep_keyed(key, threshold, k), 0.0, v)
    elif OTHER == "dropped":
        v = factor * tl.where(vector(other, k, K) == 0, v, 0.0)
    elif OTHER == "minus":
        v = factor * (v - vector(other, k, K).to(tl.float32))
    if by is not None:
        v *= vector(by, k, K)
    return v


@kernel("x other by out scale", **ANY_LENGTH)
def fp8_rows_kernel(
    x, other, by, offsets, seed, out, scale, factor, threshold, M, K, G, stride_xm, stride_other,
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
    key = None
    if seed is not None:
        key = key_of(tl.load(seed), t)
    first = _columns(x, other, by, factor, key, threshold, k, K, OTHER)
    largest = tl.abs(first)
    for k0 in range(BLOCK_K, K, BLOCK_K):
        largest = tl.maximum(largest, tl.abs(_columns(x, other, by, factor, key, threshold, k0 + k, K, OTHER)))
    s = _scale_of(tl.max(largest, axis=0))
    tl.store(scale + t, s)
    inverse = tl.div_rn(1.0, s)
    put(_code(first * inverse, PTX), out + t * K, k, K)
    for k0 in range(BLOCK_K, K, BLOCK_K):
        v = _columns(x, other, by, factor, key, threshold, k0 + k, K, OTHER)
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


@kernel("x by out scale")
def mx_rows_kernel(
    x, by, out, scale, M, K, groups, along, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):
    """The same where 32 columns share an exponent, the least that leaves nothing above 448; those of a token side by side.
    With ``by`` x is a W of such codes turned, whose scales, ``along`` to a column, are those of 32 rows."""
    t, k = block_on(0, BLOCK_M), block_on(1, BLOCK)
    mask = within(t, k, M, K)
    v = tl.load(addresses(Matrix(x, stride_xm, stride_xk), t, k), mask=mask, other=0.0).to(tl.float32)
    if by is not None:
        v *= tl.load(by + (t // 32)[:, None] + k[None, :].to(tl.int64) * along, mask=mask, other=0.0)
    parts = tl.reshape(v, (BLOCK_M, BLOCK // 32, 32))
    e = (tl.div_rn(tl.max(tl.abs(parts), axis=2), 448.0).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    parts *= ((254 - e) << 23).to(tl.float32, bitcast=True)[:, :, None]
    g = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(scale + t[:, None].to(tl.int64) * groups + g[None, :], e.to(tl.uint8), mask=within(t, g, M, groups))
    code = _code(tl.reshape(parts, (BLOCK_M, BLOCK)), PTX)
    tl.store(out + t[:, None].to(tl.int64) * K + k[None, :], code, mask=mask)


@kernel("x out scale", **ANY_LENGTH)
def nv_rows_kernel(x, out, scale, whole, K, groups, stride_xm, BLOCK_K: tl.constexpr, PTX: tl.constexpr):
    """x as NVFP4, a token for each program, which reads it twice: two e2m1 codes in a byte, the low half first, an e4m3 scale
    for 16, and a float32 one of the token. A NaN, or what is infinite, makes that of its token so."""
    t = tl.program_id(0).to(tl.int64)
    k, g, two = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 16), tl.arange(0, BLOCK_K // 2)
    x += t * stride_xm
    largest = tl.zeros((BLOCK_K,), tl.int32)  # as bits, of which a NaN's are the largest
    for k0 in range(0, K, BLOCK_K):
        largest = tl.maximum(largest, vector(x, k0 + k, K).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    a = tl.div_rn(tl.max(largest, axis=0).to(tl.float32, bitcast=True), 2688.0)  # 448 * 6
    a = tl.where(a < 1.1754943508222875e-38, 1.1754943508222875e-38, a)
    tl.store(whole + t, a)
    for k0 in range(0, K, BLOCK_K):
        parts = tl.reshape(vector(x, k0 + k, K).to(tl.float32), (BLOCK_K // 16, 16))
        s = _code(tl.minimum(tl.div_rn(tl.div_rn(tl.max(tl.abs(parts), axis=1), 6.0), a), 448.0), PTX)
        put(s, scale + t * groups + k0 // 16, g, groups - k0 // 16)
        each = (s.to(tl.float8e4nv, bitcast=True).to(tl.float32) * a)[:, None]
        code = _nearest(tl.where(each == 0, 0.0, tl.div_rn(parts, tl.broadcast_to(each, parts.shape))), 1, 1, 7)
        low, high = tl.split(tl.reshape(code, (BLOCK_K // 2, 2)))
        put(low | (high << 4), out + t * (K // 2) + k0 // 2, two, K // 2 - k0 // 2)


@kernel("codes out")
def turn_kernel(codes, out, N, K, stride_n, stride_k, BLOCK: tl.constexpr):
    """Bytes (N, K) as (K, N), without gaps."""
    n, k = block_on(0, BLOCK), block_on(1, BLOCK)
    v = tl.load(addresses(Matrix(codes, stride_n, stride_k), n, k), mask=within(n, k, N, K))
    tl.store(addresses(Matrix(out, N, None), k, n), v.T, mask=within(k, n, K, N))


@kernel("x x_scale w w_scale h b out pre_scale", "M N K x, M N R h")
def fp8_gemm_kernel(
    x, w, x_scale, w_scale, x_whole, w_whole, h, b, out, pre_scale, residual, m, c, bias, M, N, K, R, groups,
    stride_wn, stride_wk, stride_hm, stride_hr, stride_br, stride_bn,
    EPILOGUE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DIVIDES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    """Where there is no TMA; with it the product is that of kernels/gemm.py. BK of 32 and 8: the tensor cores of Blackwell
    multiply by scales of both, for so many bytes of a row, in which K counts: by a power of two for 32 codes of e4m3 (of W it
    may be float32), or an e4m3 number for 16 of e2m1, behind which x has x_whole for a token and W w_whole, which DIVIDES. Two
    products of e2m1 take as long as one of e4m3, and count as one."""
    SCALED: tl.constexpr = BK == 32 or BK == 8
    CODE: tl.constexpr = "e2m1" if BK == 8 else "e4m3"
    row, col = tile_of_product(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    t, n, k = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at_x, at_w = addresses(Matrix(x, K, None), t, k), addresses(Matrix(w, stride_wk, stride_wn), k, n)
    if SCALED:
        g = tl.arange(0, BLOCK_K // BK)
        by_x, by_w = addresses(Matrix(x_scale, groups, None), t, g), addresses(Matrix(w_scale, groups, None), n, g)
    acc = zeros(BLOCK_M, BLOCK_N)
    for k0 in range(0, K, BLOCK_K):
        xt = tl.load(at_x, mask=within(t, k, M, K - k0), other=0.0)
        wt = tl.load(at_w, mask=within(k, n, K - k0, N), other=0.0)
        if SCALED:
            xs = tl.load(by_x, mask=within(t, g, M, groups - k0 // BK), other=0)
            ws = tl.load(by_w, mask=within(n, g, N, groups - k0 // BK), other=0)
            if BK == 8:
                xs, ws = xs.to(tl.float8e4nv, bitcast=True), ws.to(tl.float8e4nv, bitcast=True)
            elif w_scale.dtype.element_ty == tl.float32:
                ws = (ws.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
            acc = tl.dot_scaled(xt, xs, CODE, wt, ws, CODE, acc)
            by_x += BLOCK_K // BK
            by_w += BLOCK_K // BK
        elif BK:
            acc += tl.dot(xt, wt) * _scale_at(x_scale, w_scale, t, n, k0, M, N, groups, BN, BK)
            x_scale += M
        else:
            acc += tl.dot(xt, wt)
        at_x += BLOCK_K
        at_w += BLOCK_K * stride_wk
    if not BK:
        acc *= _scale_at(x_scale, w_scale, t, n, 0, M, N, groups, BN, 1)
    if x_whole is not None:
        whole = vector(x_whole, t, M)
        acc *= (whole / tl.load(w_whole) if DIVIDES else whole * tl.load(w_whole))[:, None]
    if h is not None:
        acc = products(acc, Matrix(h, stride_hm, stride_hr), Matrix(b, stride_br, stride_bn), row, col, M, N, R, BLOCK_R)
    finish(acc, (out, pre_scale, residual, m, c, bias), row, col, M, N, EPILOGUE)


@triton.jit
def _scale_at(x_scale, w_scale, t, n, k0, M, N, groups, BN: tl.constexpr, BK: tl.constexpr):
    by_n = tl.load(w_scale + (n // BN).to(tl.int64) * groups + k0 // BK, mask=n < N, other=0.0)
    return vector(x_scale, t, M)[:, None] * by_n[None, :]
