"""The row norms of W + s_a B_a A_a of every adapter, their squares multiplied out; see fdora/triton/multi_norm.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.multi import rank_of
from fdora.triton.kernels.tile import Matrix, block_on, both, loaded, vector, within, zeros
from fdora.triton.runtime.cost import kernel
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def _factors(at_a, in_r, k, K, stride_ak, EVEN: tl.constexpr):
    at = at_a + k[None, :].to(tl.int64) * stride_ak
    return tl.load(at) if EVEN else tl.load(at, mask=both(in_r, k < K), other=0.0)


@triton.jit
def _gram(at_a, in_r, by, a, r, part, grams, K, G, span, stride_ak, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
          STAGES: tl.constexpr, EVEN: tl.constexpr):
    """s^2 A A^T of each adapter over a span of columns, out of the product of all."""
    gram = zeros(a.shape[0], a.shape[0])
    for k0 in tl.range(part * span, tl.minimum(part * span + span, K), BLOCK_K, num_stages=STAGES):
        f = _factors(at_a, in_r, k0 + tl.arange(0, BLOCK_K), K, stride_ak, EVEN)
        gram += (by * by)[:, None] * tl.dot(f, tl.trans(f))
    at = ((part.to(tl.int64) * G + a) * BLOCK_R + r)[:, None] * BLOCK_R + r[None, :]
    tl.store(grams + at, gram, mask=(a[:, None] == a[None, :]) & (a < G)[:, None])


@kernel("W A B partial grams", "N K R G A, R K R G A")
def strip_norm_kernel(
    W, A, B,  # (N, K), (G, R, K), (G, N, R)
    s, ranks,  # (G,)
    partial, grams,  # (spans, G + 1, N), (spans, G, BLOCK_R, BLOCK_R)
    N, K, R, G, span, stride_wn, stride_wk, stride_aa, stride_ar, stride_ak, stride_ba, stride_bn, stride_br,
    ADAPTERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):
    """The terms of ||W_n||^2 + <b_n, 2 s A W_n> + <b_n, s^2 A A^T b_n> over ``span`` columns, for adapters whose ranks lie
    beside each other in one product with W. Of BLOCK_N rows the second and, after those of all adapters, the first; of the
    program ahead of the first rows s^2 A A^T."""
    if PDL:
        gdc_launch_dependents()
    first, part = tl.program_id(0) * ADAPTERS, tl.program_id(2)
    j = tl.arange(0, ADAPTERS * BLOCK_R)
    a, r = (first + j // BLOCK_R).to(tl.int64), j % BLOCK_R
    in_r = r < rank_of(ranks, a, G, R)
    by = vector(s, a, G)
    at_a = A + (a * stride_aa + r.to(tl.int64) * stride_ar)[:, None]
    if tl.program_id(1) == 0:  # the first to begin: it waits for each of its loads
        _gram(at_a, in_r, by, a, r, part, grams, K, G, span, stride_ak, BLOCK_K, BLOCK_R, STAGES, EVEN and ranks is None)
        return
    n = (tl.program_id(1) - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_b = B + n[:, None].to(tl.int64) * stride_bn + (a * stride_ba + r.to(tl.int64) * stride_br)[None, :]
    b = tl.load(at_b, mask=both(n < N, in_r), other=0.0)
    cross, squares = zeros(BLOCK_N, ADAPTERS * BLOCK_R), zeros(BLOCK_N, BLOCK_K)
    for k0 in tl.range(part * span, tl.minimum(part * span + span, K), BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        w = loaded(Matrix(W, stride_wn, stride_wk), n, k, N, K, EVEN)
        f = _factors(at_a, in_r, k, K, stride_ak, EVEN and ranks is None)
        # Scaled here, so that each product begins at 0: accumulators of tensor cores cut off what rounding would add.
        cross += (2 * by)[None, :] * tl.dot(w, tl.trans(f))
        v = w.to(tl.float32)
        squares += v * v
    own = first + tl.arange(0, ADAPTERS)
    terms = tl.sum(tl.reshape(b.to(tl.float32) * cross, (BLOCK_N, ADAPTERS, BLOCK_R)), axis=2)
    here = partial + part.to(tl.int64) * (G + 1) * N + n
    tl.store(here[:, None] + own[None, :].to(tl.int64) * N, terms, mask=within(n, own, N, G))
    if first == 0:
        tl.store(here + tl.cast(G, tl.int64) * N, tl.sum(squares, axis=1), mask=n < N)


@triton.jit
def _direct(W, A, b, by, n, rank, N, K, BLOCK_K: tl.constexpr):
    """The sums of squares of rows n of W + s b A."""
    r, squares = tl.arange(0, b.shape[1]), zeros(n.shape[0])
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        w = loaded(W, n, k, N, K).to(tl.float32)
        v = w + by * tl.dot(b, loaded(A, r, k, rank, K))
        squares += tl.sum(v * v, axis=1)
    return squares


@kernel("B partial grams c", "N R R G c")
def strip_root_kernel(
    W, A, B,  # (N, K), (G, R, K), (G, N, R)
    s, ranks,  # (G,)
    partial, grams,  # (spans, G + 1, N), (spans, G, BLOCK_R, BLOCK_R)
    c,  # (G, width)
    N, K, R, G, spans, first, width, stride_wn, stride_wk, stride_aa, stride_ar, stride_ak, stride_ba, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
    CANCELLED: tl.constexpr, PDL: tl.constexpr,
):
    """The roots of an adapter's sums of terms, into N columns of c from ``first`` on. A row whose terms
    cancel is summed again directly, by the program that has it."""
    g, n = tl.program_id(1).to(tl.int64), block_on(0, BLOCK_N)
    r, i = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_R)
    rank = rank_of(ranks, g, G, R)
    b = loaded(Matrix(B + g * stride_ba, stride_bn, stride_br), n, r, N, rank)
    cross, size = zeros(BLOCK_N), zeros(BLOCK_N)
    gram = zeros(BLOCK_R, BLOCK_R)
    if PDL:
        gdc_wait()
    for p in range(0, spans):
        at = partial + tl.cast(p, tl.int64) * (G + 1) * N + n
        cross += tl.load(at + g * N, mask=n < N, other=0.0)
        size += tl.load(at + tl.cast(G, tl.int64) * N, mask=n < N, other=0.0)
        gram += tl.load(grams + ((p * G + g) * BLOCK_R + i[:, None]) * BLOCK_R + r[None, :])
    wide = b.to(tl.float32)
    size += tl.sum(tl.dot(wide, gram, input_precision=PRECISION) * wide, axis=1)
    sq = size + cross
    lost = sq < CANCELLED * size  # not where it is NaN
    if tl.max(lost.to(tl.int32), axis=0) > 0:
        own = Matrix(A + g * stride_aa, stride_ar, stride_ak)
        again = _direct(Matrix(W, stride_wn, stride_wk), own, b, tl.load(s + g), n, rank, N, K, BLOCK_K)
        sq = tl.where(lost, again, sq)
    tl.store(c + g * width + first + n, tl.sqrt_rn(sq), mask=n < N)
