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

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fdora._records import NormOf
from fdora.triton.codes import Packed
from fdora.triton.hash import UNGUARDED, WORDS, Guard, fingerprint
from fdora.triton.kernels.norm import norm_kernel
from fdora.triton.norm_codes import squares_of_codes
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, Scalar, Tile, cdiv, is_tma_compatible, named
from fdora.triton.split import Factors, by_rows
from fdora.triton.sums import chosen, column_sums
from fdora.triton.tiles.configs import MIN_K, NormConfig, norm_config

PATH = "one pass over W, nothing of its size written"
NEXT = "next_w next_a next_b"  # from one expert to the next
ALONE = named(NEXT, (None,) * 3)
SPLIT = "; float32 factors as float16 ones of three times the rank"


def norm_fwd(of: NormOf) -> Tensor:
    """c (N,) float32. W is read once whether its squared norm is known or not."""
    # by name: Dynamo of torch 2.8 cannot slice a NamedTuple
    c: Tensor = plan_norm.call(of.W, of.A, of.B, of.s, of.max_bytes, False)
    return c


def sqnorm_fwd(of: NormOf) -> Tensor:
    """c^2 (N,), to be added to that of other columns."""
    squares: Tensor = plan_norm.call(of.W, of.A, of.B, of.s, of.max_bytes, True)
    return squares


def norm_guarded(of: NormOf, c: Tensor, old_hash: Tensor) -> tuple[Tensor, Tensor]:
    """c and the fingerprint of A, B, s. The c given is returned where the fingerprint given is theirs."""
    c, new_hash = plan_guarded_norm.call(of.W, of.A, of.B, of.s, of.max_bytes, c, old_hash)
    return c, new_hash


@planned(
    "row_norm(Tensor W, Tensor A, Tensor B, float s, SymInt? max_bytes, bool squared) -> Tensor",
    "dora_norm",
    "matrix matrix matrix s",
    lambda W, *_: {"c": (W.shape[:1], torch.float32)},
    PATH,
)
def plan_norm(plan: Builder, W: Array, A: Array, B: Array, s: Scalar, max_bytes: int | None, squared: bool) -> None:
    (c,) = plan.wanted()
    norm(plan, W, A, B, s, c, max_bytes, squared)


def guarded_forms(N: Any) -> dict[str, Any]:
    return {"c": ((N,), torch.float32), "fingerprint": ((WORDS,), torch.int64)}


@planned(
    "row_norm_guarded(Tensor W, Tensor A, Tensor B, float s, SymInt? max_bytes, Tensor c, Tensor old_hash) -> Tensor[]",
    "dora_norm where A, B or s changed",
    "matrix matrix matrix vector vector s",
    lambda W, *_: guarded_forms(W.shape[0]),
    PATH,
)
def plan_guarded_norm(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    before: Array,
    old_hash: Array,
    s: Scalar,
    max_bytes: int | None,
    in_place: bool = False,
) -> None:
    guarded_norm(plan, W, A, B, s, before, old_hash, max_bytes, in_place)
    plan.path += "; the kernels return at once where A, B and s are what they were"


def guarded_norm(
    plan: Builder,
    W: Array | Packed,
    A: Array,
    B: Array,
    s: Scalar,
    before: Array,
    old_hash: Array,
    max_bytes: int | None = None,
    in_place: bool = False,
) -> None:
    """Results: c and the fingerprint of A, B and s."""
    c, new_hash = plan.wanted()
    fingerprint(plan, A, B, s, new_hash)
    norm(plan, W, A, B, s, c, max_bytes, guard=Guard(before, old_hash, new_hash, in_place))


def norm(
    plan: Builder,
    W: Array | Packed,
    A: Array,
    B: Array,
    s: Scalar,
    c: Array,
    max_bytes: int | None = None,
    squared: bool = False,
    guard: Guard = UNGUARDED,
    dense: Array | None = None,
    first: int = 0,
) -> None:
    """Into c (N,) float32. ``max_bytes`` bounds the partials and the split factors: fewer rows at a time where they would not
    fit. Of a W of codes it is the norm of N rows from ``first`` on, and W goes into ``dense``."""
    of: Factors | None = None
    for i, j, of in by_rows(plan, A, B, guard, max_bytes, 4 * max(1, cdiv(W.shape[1], MIN_K))):
        rows, part = c.rows(i, j), guard.rows(i, j)
        if isinstance(W, Packed):
            partial = squares_of_codes(plan, W, of, s, part, dense, first + i)
        else:
            partial = squares(plan, W.rows(i, j), of, s, part)
        if guard is UNGUARDED:
            column_sums(plan, partial, rows, sqrt=not squared)
        else:
            chosen(plan, partial, rows, part)
    if of is not None and of.scale_k is not None:
        plan.path += SPLIT


def squares(
    plan: Builder, W: Array, of: Factors, s: Scalar | Array, guard: Guard = UNGUARDED, ranks: Array | None = None
) -> Array:
    """(tiles or strips along K, N): sums of squares of the rows of W + s B A. Of experts, each array with an axis more, as many
    of these; their ``ranks``, where they are below that of A and B."""
    owners, next_one = W.shape[:-2], ALONE
    if owners:
        next_one = named(NEXT, (t.stride[0] for t in (W, of.A, of.B)))
        W, of = W[0], of._replace(A=of.A[0], B=of.B[0])
    (N, K), (A, B, *_), half = W.shape, of, W.itemsize == 2
    aligned = half and not owners and all(is_tma_compatible(t) for t in (W, A, B))  # a descriptor is of one matrix
    # Pointers that Triton knows to be of 16 bytes: by what it sees of a number, whether 16 divides it. Of B one slab is read.
    whole = half and all(is_tma_compatible(t) and t.stride[0] % 16 == 0 for t in (W, A)) and K % 16 == 0
    config = norm_config(A.shape[0], A.itemsize == 2, plan.device.capability, aligned, half, K if whole else 0)
    tiles = cdiv(K, config.SPAN or config.BLOCK_K)
    partial = plan.temp((*owners, tiles, N))
    programs, guarded = cdiv(N, config.BLOCK_N) * tiles, guard is not UNGUARDED
    if guarded or config.TMA:
        programs = min(programs, config.PROGRAMS * plan.device.num_sms)
    given = tiled(config, W, A, B) | {"partial": partial, "s": s, "span": config.SPAN or None, "ranks": ranks}
    if ranks is not None:
        given["EVEN"] = min(given["EVEN"], 1)
    # Each of the three kernels of a guarded call is resident before the one ahead of it ends: 2 us less where nothing changed.
    plan.launch(norm_kernel, (programs, *owners), given, of, guard, config, next_one, pdl=guarded and plan.pdl)
    return partial


def tiled(config: NormConfig, W: Array, A: Array, B: Array) -> dict[str, Any]:
    """W, A and B as a kernel takes them, their sizes, and what of its tiles is whole: EVEN of kernels/tile.py."""
    n, k, r = config[:3]
    (N, K), R = W.shape, A.shape[0]
    found = {"N": N, "K": K, "R": R, "EVEN": 0 if N % n or K % k else 1 if R % r else 2}
    blocks = ((n, k), (r, k), (n, r))
    tiles: Iterable[Any] = map(Tile, (W, A, B), blocks) if config.TMA else (W, A, B)
    return found | named("W A B", tiles)
