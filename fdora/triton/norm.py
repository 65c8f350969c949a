"""Row norms on tensor cores: ``c = ||W + s B A||`` in one pass over W, nothing of size (N, K) written.

A program owns one tile of W. It multiplies the slabs of B and A that belong there, adds the tile, squares, and writes one
partial sum per row; a second kernel adds the partials of a row in a fixed order, so two runs agree bit for bit.

Roof at 8192 x 8192, r = 384 in bf16 on an H100: 51.5 GFLOP of products (67 us) beside 134 MB of W (45 us). The tile of W
is loaded before the products, so its latency hides behind them.

float32 factors run as float16 ones of three times the rank (_split.py). Above r = 64 TMA fetches the tiles where it can.

With a norm of before and the fingerprint it belongs to, each program compares that with the fingerprint of now and has
nothing to do where they agree; a few programs share the tiles then, so that doing nothing takes no time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fdora.triton._fingerprint import WORDS, fingerprint, unchanged
from fdora.triton._launch import (
    SUM_N,
    SUM_T,
    capability,
    cdiv,
    column_sums,
    fits_tma,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    multiprocessors,
    overlaps,
    traced,
)
from fdora.triton._op import op
from fdora.triton._repeat import repeatable
from fdora.triton._split import rows_at_a_time, split_A, split_B
from fdora.triton._tile import GROUP, tile_at, unscaled, weight_and_product, weight_and_product_tma
from fdora.triton.configs import MAX_N, MIN_K, norm_config


@triton.jit
def _norm_tile(
    i, W, A, B, scale_n, scale_k, partial, s, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    tile_n, tile_k = tile_at(i, N, K, BLOCK_N, BLOCK_K, GROUP)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    if TMA:
        w, acc = weight_and_product_tma(W, A, B, tile_n * BLOCK_N, tile_k * BLOCK_K, R, BLOCK_N, BLOCK_K, BLOCK_R)
    else:
        w, acc = weight_and_product(
            W, A, B, n, k, N, K, R, stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br, BLOCK_R, EVEN, PRECISION
        )
    if SCALED and TMA:  # a half of the columns at a time: the scales of 256 would spill
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
        w_low, w_high = tl.split(tl.permute(tl.reshape(w, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K // 2)
        v = w_low + s * unscaled(low, scale_n, scale_k, n, k, N, K)
        squares = tl.sum(v * v, axis=1)
        v = w_high + s * unscaled(high, scale_n, scale_k, n, k + BLOCK_K // 2, N, K)
        squares += tl.sum(v * v, axis=1)
    else:
        v = w + s * (unscaled(acc, scale_n, scale_k, n, k, N, K) if SCALED else acc)
        squares = tl.sum(v * v, axis=1)
    tl.store(partial + tile_k.to(tl.int64) * N + n, squares, mask=n < N)


@triton.jit
def _norm_kernel(
    W, A, B, scale_n, scale_k, partial, seen, now, s, N, K, R,
    stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if GUARDED or TMA:
        tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K)
        if GUARDED:
            tiles = tl.where(unchanged(seen, now, WORDS), 0, tiles)
        # Flattened, the copies of the next tile start under the last products and the squares of this one.
        for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=TMA):
            _norm_tile(
                i, W, A, B, scale_n, scale_k, partial, s, N, K, R,
                stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
                BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
            )  # fmt: skip
    else:
        _norm_tile(
            tl.program_id(0), W, A, B, scale_n, scale_k, partial, s, N, K, R,
            stride_wn, stride_wk, stride_ar, stride_ak, stride_bn, stride_br,
            BLOCK_N, BLOCK_K, BLOCK_R, GROUP, EVEN, PRECISION, TMA, SCALED,
        )  # fmt: skip


@triton.jit
def _choose_kernel(
    partial, c, seen, now, out, N, strips,
    KEEP: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The root of the column sums, added as in _launch._sum_kernel; or c as it was. KEEP writes it over c, too."""
    if PDL:
        gdc_wait()
    same = unchanged(seen, now, WORDS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for t0 in range(0, 0 if same else strips, BLOCK_T):
        mask = (t0 + t < strips)[:, None] & (n < N)[None, :]
        acc += tl.sum(tl.load(partial + (t0 + t)[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0), axis=0)
    before = tl.load(c + n, mask=n < N, other=0.0)
    after = tl.where(same, before, tl.sqrt_rn(acc))
    tl.store(out + n, after, mask=n < N)
    if KEEP:
        tl.store(c + n, after, mask=n < N)


class Guard(NamedTuple):
    """A norm of before, the fingerprint it belongs to, and that of now."""

    c: Tensor
    seen: Tensor
    now: Tensor
    keep: bool  # the norm of now takes the place of c


def norm_fwd(W: Tensor, A: Tensor, B: Tensor, base_sqnorm: Tensor | None, s: float, max_bytes: int | None) -> Tensor:
    """(N, K), (r, K), (N, r) -> c (N,) float32. W is read once whether its squared norm is known or not."""
    return (row_norm if traced(W) else _row_norm)(W, A, B, s, max_bytes, False)


def sqnorm_fwd(W: Tensor, A: Tensor, B: Tensor, base_sqnorm: Tensor | None, s: float, max_bytes: int | None) -> Tensor:
    """c^2 (N,), to be added to that of other columns."""
    return (row_norm if traced(W) else _row_norm)(W, A, B, s, max_bytes, True)


def norm_guarded(
    W: Tensor, A: Tensor, B: Tensor, base_sqnorm: Tensor | None, s: float, max_bytes: int | None, c: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """c and the fingerprint of A, B, s. The c given is returned where the fingerprint given is theirs."""
    new, now = (row_norm_guarded if traced(W) else _row_norm_guarded)(W, A, B, s, max_bytes, c, seen)
    return new, now


def norm_kept(W: Tensor, A: Tensor, B: Tensor, s: float, c: Tensor, seen: Tensor) -> Tensor:
    """A copy of c, after c and seen were brought up to date."""
    return (row_norm_kept if traced(W) else _row_norm_kept)(W, A, B, s, c, seen)


@repeatable
def _row_norm(W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, squared: bool) -> Tensor:
    return _norm(W, A, B, s, max_bytes, squared, None)


def _norm(W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, squared: bool, guard: Guard | None) -> Tensor:
    """max_bytes bounds the partials and the split factors: fewer rows at a time where they would not fit."""
    (N, K), R = W.shape, A.shape[0]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = A.float(), B.float()
    c = torch.empty(N, device=W.device, dtype=torch.float32)
    row_bytes = 4 * max(1, cdiv(K, MIN_K))
    rows = 0 if A.element_size() == 2 else rows_at_a_time(N, K, R, max_bytes, row_bytes)
    split = rows > 0
    if not split:
        rows = N if max_bytes is None else max(MAX_N, max_bytes // row_bytes)
    hashes = None if guard is None else (guard.seen, guard.now)
    a, by_k = split_A(A, hashes) if split else (A, None)
    for i in range(0, N, max(1, rows)):
        w, part = W[i : i + rows], None if guard is None else guard._replace(c=guard.c[i : i + rows])
        b, by_n = split_B(B[i : i + rows], hashes) if split else (B[i : i + rows], None)
        _launch(w, a, b, by_n, by_k, c[i : i + rows], s, squared, part)
    return c


@repeatable
def _guarded(
    W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, c: Tensor, seen: Tensor, keep: bool
) -> list[Tensor]:
    now = fingerprint(A, B, s)
    return [_norm(W, A, B, s, max_bytes, False, Guard(c.contiguous(), seen.contiguous(), now, keep)), now]


def _row_norm_guarded(
    W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, c: Tensor, seen: Tensor
) -> list[Tensor]:
    return _guarded(W, A, B, s, max_bytes, c, seen, False)


_made_from: dict[int, tuple[int, int]] = {}  # address of seen -> address and version of the W that c is of


def _row_norm_kept(W: Tensor, A: Tensor, B: Tensor, s: float, c: Tensor, seen: Tensor) -> Tensor:
    """Writes c and seen, and says so neither to the compiler nor to autograd's version counters.

    A checkpoint computes this again from the c and seen of its forward. Were the write declared, a second forward before that
    would make autograd refuse the backward. The write needs no order: whatever pair c and seen hold, also after a call was
    repeated or left out, the result is the norm of these W, A, B and s.
    """
    c, seen = c.data, seen.data
    made_from = (W.data_ptr(), 0 if W.is_inference() else W._version)
    if _made_from.get(seen.data_ptr()) != made_from:
        seen.zero_()  # which matches nothing
        _made_from[seen.data_ptr()] = made_from
    out, now = _guarded(W, A, B, s, None, c, seen, True)
    seen.copy_(now)
    return out


def _fake_row_norm(W, A, B, s, max_bytes, squared):
    return W.new_empty(W.shape[0], dtype=torch.float32)


def _fake_row_norm_guarded(W, A, B, s, max_bytes, c, seen):
    return [W.new_empty(W.shape[0], dtype=torch.float32), W.new_empty(WORDS, dtype=torch.int64)]


def _fake_row_norm_kept(W, A, B, s, c, seen):
    return W.new_empty(W.shape[0], dtype=torch.float32)


def _launch(
    W: Tensor, A: Tensor, B: Tensor, by_n: Tensor | None, by_k: Tensor | None, c: Tensor, s: float, squared: bool,
    guard: Guard | None,
) -> None:  # fmt: skip
    (N, K), R, half = W.shape, A.shape[0], W.element_size() == 2
    config = norm_config(R, A.element_size() == 2, capability(W.device), half, half)
    block_n, block_k, block_r, precision, num_warps, num_stages, tma = config
    tma = tma and all(fits_tma(t) for t in (W, A, B))
    tiles = cdiv(K, block_k)
    partial = torch.empty((tiles, N), device=W.device, dtype=torch.float32)
    programs = cdiv(N, block_n) * tiles
    before, seen, now, keep = guard or (None, None, None, False)
    # Each of the three kernels of a guarded call is resident before the one ahead of it ends: 2 us less where nothing changed.
    pdl = guard is not None and overlaps(W.device)
    if guard is not None or tma:
        programs = min(programs, (1 if tma else 2) * multiprocessors(W.device))
    if programs:
        tensors: tuple = (W, A, B)
        strides: tuple = (*W.stride(), *A.stride(), *B.stride())
        if tma:
            blocks = ((block_n, block_k), (block_r, block_k), (block_n, block_r))
            tensors = tuple(TensorDescriptor.from_tensor(t, list(b)) for t, b in zip(tensors, blocks, strict=True))
            strides = (None,) * 6
        launch(
            _norm_kernel, (programs,), (*tensors, by_n, by_k, partial, seen, now, s, N, K, R, *strides),
            (block_n, block_k, block_r, GROUP, N % block_n == 0 and K % block_k == 0 and R % block_r == 0, precision, tma,
             by_n is not None, guard is not None, WORDS, pdl), num_warps, num_stages, pdl,
        )  # fmt: skip
    if guard is None:
        column_sums(partial, c, sqrt=not squared)
    else:
        args = (partial, before, seen, now, c, N, tiles)
        launch(_choose_kernel, (cdiv(N, SUM_N),), args, (keep, WORDS, SUM_N, SUM_T, pdl), 4, 3, pdl)


row_norm = op("row_norm", _row_norm, _fake_row_norm)
row_norm_guarded = op("row_norm_guarded", _row_norm_guarded, _fake_row_norm_guarded)
row_norm_kept = op("row_norm_kept", _row_norm_kept, _fake_row_norm_kept, mapped=False)
