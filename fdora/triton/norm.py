"""Row norms on tensor cores: ``c = ||W + s B A||`` in one pass over W, nothing of size (N, K) written.

A program owns one tile of W. It multiplies the slabs of B and A that belong there, adds the tile, squares, and writes one
partial sum per row; a second kernel adds the partials of a row in a fixed order, so two runs agree bit for bit.

Roof at 8192 x 8192, r = 384 in bf16 on an H100: 51.5 GFLOP of products (67 us) beside 134 MB of W (45 us). The tile of W
is loaded before the products, so its latency hides behind them.

float32 factors run as float16 ones of three times the rank (split.py). On Hopper, up to r = 128, a program walks along a
strip of W with its rows of B at hand and three tiles of W ahead; above that TMA fetches the tiles where it can.

With a norm of before and the fingerprint it belongs to, each program compares that with the fingerprint of now and has
nothing to do where they agree; a few programs share the tiles then, so that doing nothing takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdora._records import NormOf
from fdora.triton.copy import in_dtype
from fdora.triton.hash import WORDS, fingerprint
from fdora.triton.kernels.norm import choose_kernel, norm_kernel
from fdora.triton.op import planned
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar, Tile
from fdora.triton.split import rows_at_a_time, split_A, split_B
from fdora.triton.sums import SUM_N, SUM_T, column_sums
from fdora.triton.tiles.configs import MAX_N, MIN_K, NormConfig, norm_config

GROUP_N = 8  # rows of tiles that run together, so that their slabs of A and B meet in L2


def norm_fwd(of: NormOf) -> Tensor:
    """c (N,) float32. W is read once whether its squared norm is known or not."""
    # by name: Dynamo of torch 2.8 cannot slice a NamedTuple
    c: Tensor = _row_norm(of.W, of.A, of.B, of.s, of.max_bytes, False)
    return c


def sqnorm_fwd(of: NormOf) -> Tensor:
    """c^2 (N,), to be added to that of other columns."""
    squares: Tensor = _row_norm(of.W, of.A, of.B, of.s, of.max_bytes, True)
    return squares


def norm_guarded(of: NormOf, c: Tensor, old_hash: Tensor) -> tuple[Tensor, Tensor]:
    """c and the fingerprint of A, B, s. The c given is returned where the fingerprint given is theirs."""
    c, new_hash = _row_norm_guarded(of.W, of.A, of.B, of.s, of.max_bytes, c, old_hash)
    return c, new_hash


class Guard(NamedTuple):
    """A norm of before, the fingerprint it belongs to, and that of now."""

    c: Array
    old_hash: Array
    new_hash: Array
    in_place: bool  # the norm of now takes the place of c


def hashes_of(guard: Guard | None) -> tuple[Array | None, Array | None]:
    """The fingerprint of before and that of now."""
    return (None, None) if guard is None else (guard.old_hash, guard.new_hash)


def plan_norm(likes: Sequence[Like | None], device: Device, max_bytes: int | None, squared: bool) -> Plan:
    plan = Builder("dora_norm", device)
    W, A, B = map(plan.matrix, likes)
    s, c = plan.scalar("s"), plan.result("c", (W.shape[0],), torch.float32)
    norm(plan, W, A, B, s, c, max_bytes, squared)
    return plan.plan()


def plan_guarded_norm(likes: Sequence[Like | None], device: Device, max_bytes: int | None, in_place: bool = False) -> Plan:
    plan = Builder("dora_norm where A, B or s changed", device)
    W, A, B = map(plan.matrix, likes[:3])
    before, old_hash = plan.vector(likes[3]), plan.vector(likes[4])
    s, c = plan.scalar("s"), plan.result("c", (W.shape[0],), torch.float32)
    new_hash = plan.result("fingerprint", (WORDS,), torch.int64)
    fingerprint(plan, A, B, s, new_hash)
    norm(plan, W, A, B, s, c, max_bytes, False, Guard(before, old_hash, new_hash, in_place))
    return plan.plan()


def norm(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    s: Scalar,
    c: Array,
    max_bytes: int | None,
    squared: bool,
    guard: Guard | None = None,
) -> None:
    """max_bytes bounds the partials and the split factors: fewer rows at a time where they would not fit."""
    (N, K), R = W.shape, A.shape[0]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = in_dtype(plan, A, torch.float32), in_dtype(plan, B, torch.float32)
    row_bytes = 4 * max(1, cdiv(K, MIN_K))
    rows = 0 if A.itemsize == 2 else rows_at_a_time(N, K, R, max_bytes, row_bytes)
    split = rows > 0
    if not split:
        rows = N if max_bytes is None else max(MAX_N, max_bytes // row_bytes)
    plan.path = "one pass over W, nothing of its size written"
    if split:
        plan.path += "; float32 factors as float16 ones of three times the rank"
    if guard is not None:
        plan.path += "; the kernels return at once where A, B and s are what they were"
    hashes = hashes_of(guard)
    a, by_k = split_A(plan, A, hashes) if split else (A, None)
    for i in range(0, N, max(1, rows)):
        part = None if guard is None else guard._replace(c=guard.c.rows(i, i + rows))
        b, by_n = split_B(plan, B.rows(i, i + rows), hashes) if split else (B.rows(i, i + rows), None)
        _norm_of_rows(plan, W.rows(i, i + rows), a, b, by_n, by_k, c.rows(i, i + rows), s, squared, part)


def _norm_of_rows(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    by_n: Array | None,
    by_k: Array | None,
    c: Array,
    s: Scalar,
    squared: bool,
    guard: Guard | None,
) -> None:
    (N, K), R, half = W.shape, A.shape[0], W.itemsize == 2
    aligned = half and all(is_tma_compatible(t) for t in (W, A, B))
    # Pointers that Triton knows to be of 16 bytes: by what it sees of a number, whether 16 divides it. Of B one slab is read.
    whole = half and all(is_tma_compatible(t) and t.stride[0] % 16 == 0 for t in (W, A)) and K % 16 == 0
    config = norm_config(R, A.itemsize == 2, plan.device.capability, aligned, half, K if whole else 0)
    tiles = cdiv(K, config.SPAN or config.BLOCK_K)
    partial = plan.temp((tiles, N), torch.float32)
    programs = cdiv(N, config.BLOCK_N) * tiles
    # Each of the three kernels of a guarded call is resident before the one ahead of it ends: 2 us less where nothing changed.
    pdl = guard is not None and plan.device.supports_pdl
    if guard is not None or config.TMA:
        programs = min(programs, config.PROGRAMS * plan.device.num_sms)
    tensors, even = tiled(config, W, A, B)
    given = {"scale_n": by_n, "scale_k": by_k, "partial": partial, "s": s, "N": N, "K": K, "R": R, "span": config.SPAN or None}
    given |= named("W A B", tensors) | named("old_hash new_hash", hashes_of(guard))
    given |= {"GROUP": GROUP_N, "EVEN": even, "WORDS": WORDS}
    plan.launch(norm_kernel, (programs,), given, config, pdl=pdl)
    if guard is None:
        column_sums(plan, partial, c, sqrt=not squared)
    else:
        chosen(plan, partial, c, guard)


def chosen(plan: Builder, partial: Array, c: Array, guard: Guard) -> None:
    """The root of the sums of partials, or the norm of before, into c."""
    (tiles, N), pdl = partial.shape, plan.device.supports_pdl
    given = {"partial": partial, "out": c, "N": N, "strips": tiles, "KEEP": guard.in_place}
    given |= {"WORDS": WORDS, "BLOCK_N": SUM_N, "BLOCK_T": SUM_T}
    plan.launch(choose_kernel, (cdiv(N, SUM_N),), given, guard, pdl=pdl)


def tiled(config: NormConfig, W: Array, A: Array, B: Array) -> tuple[tuple, int]:
    """W, A and B as a kernel takes them, and what of its tiles is whole: EVEN of kernels/tile.py."""
    n, k, r = config[:3]
    (N, K), R = W.shape, A.shape[0]
    even = 0 if N % n or K % k else 1 if R % r else 2
    if config.TMA:
        return (Tile(W, (n, k)), Tile(A, (r, k)), Tile(B, (n, r))), even
    return (W, A, B), even


row_norm, _row_norm = planned(
    "row_norm",
    "(Tensor W, Tensor A, Tensor B, float s, SymInt? max_bytes, bool squared) -> Tensor",
    plan_norm,
    lambda W, *_: (W.shape[:1], torch.float32),
)
row_norm_guarded, _row_norm_guarded = planned(
    "row_norm_guarded",
    "(Tensor W, Tensor A, Tensor B, float s, SymInt? max_bytes, Tensor c, Tensor old_hash) -> Tensor[]",
    plan_guarded_norm,
    lambda W, *_: [(W.shape[:1], torch.float32), ((WORDS,), torch.int64)],
)
