"""How long a product takes on a GPU, by a model of waves: a pure function of the shape and the GPU.

The tiles of a result are spread over the multiprocessors. One that gets ``share`` of them, ``together`` at a time, takes

    max( share steps step, waves steps latency ) + waves edge      share = ceil(tiles / multiprocessors)
                                                                   waves = ceil(share / together)

with ``step`` the flops of a tile's step along K over ``reached`` x the rate of a multiprocessor, less up to ALONE of it where
one has two tiles at most and others have fewer, and FILLED for the rows that a tile has and x has not, ``latency`` what a
step takes at least, and ``edge`` what begins and ends a tile. Beside it stands the time of the bytes, at ``memory`` x
bandwidth. Both are joined by a norm of fourth order, and ``start`` is added: a launch.

cuBLAS is the same model with many tiles, each also split along K, and the best of them: the sides of its tiles are multiples of
8 (its kernels are named 64 x 72 or 256 x 136), so rows are divided evenly and the last wave is full. What a pass over the
result adds to it is linear in the result's size and in the rank. Which kernel cuBLAS takes is its own choice: of 65 to 512
tokens it took up to 1.66 of what the model says, and never under 0.87. So its ways count DOUBT times that there.

The numbers are fitted to measurements on one GPU (tiles/products.json, written by ``bench.fit``). On any other the shares of
rate and bandwidth stay, and the times in us, which are mostly latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from fdora.rates import BY_CAPABILITY
from fdora.triton.runtime.device import cdiv

SIDES, LARGEST = (64, 128, 192, 256), 256 * 160  # of cuBLAS's tiles, beside those that fit a shape
SPLITS = (1, 2, 3, 4, 6, 8)
LEAST_K = 256  # of a part
SLOW_COPY = 4.0  # us: rows of h and B that do not begin at 16 bytes are copied first
ALONE = 0.2  # of a step: L2 and power are shared, so the fewer multiprocessors are at work, the faster each is
DOUBT, DOUBTED = 1.05, range(65, 513)  # tokens: with fewer the model is as good as of any tile, and with more
# Below ceilings are written out: each is asked for hundreds of times when a plan is made for a new number of tokens.
FILLED = 1.7e-3  # us: 128 bytes of a row that TMA fills up take so much longer than those of one that it fetches


class Gpu(NamedTuple):
    """Multiprocessors, half-precision flops of each of them per us, and bytes of memory per us."""

    num_sms: int
    flops: float
    bytes: float


@lru_cache(16)
def gpu_of(capability: int, num_sms: int) -> Gpu:
    """A capability that is not listed counts as the one before it."""
    known = BY_CAPABILITY[max((c for c in BY_CAPABILITY if c <= capability), default=0)]
    return Gpu(max(1, num_sms), known.flops / 1e6 / known.num_sms, known.bytes / 1e6)


class Tile(NamedTuple):
    """A tile of a product and how programs run it; see the formula above."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    together: int


class Fit(NamedTuple):
    reached: float
    latency: float  # us
    edge: float  # us
    start: float  # us
    memory: float


class CublasFit(NamedTuple):
    """``reached`` by a tile is ``most`` / (1 + ``bytes_weigh`` (1 / BLOCK_M + 1 / BLOCK_N)); ``edge`` is that of 128 x 256."""

    most: float
    bytes_weigh: float
    edge: float
    start: float
    memory: float
    latency: float
    split: float  # us: adding parts,
    part: float  # and for each 10^6 elements of one


class PassFit(NamedTuple):
    """us: ``start`` + ``rank`` r / 64 + M N / 10^6 (``size`` + ``both`` r / 64)."""

    start: float
    rank: float
    size: float
    both: float


def fused_us(M: int, N: int, K: int, r: int, tile: Tile, fit: Fit, gpu: Gpu, weights: int = 1, moved: bool = True) -> float:
    """One product with the low-rank term inside; of rows that have so many W. ``moved``: the last tile ends with the last row
    where there are enough (gemm.py); else it is filled up, which is seen where tiles above one another are few."""
    steps = cdiv(K, tile.BLOCK_K) + cdiv(r, tile.BLOCK_K)
    copies = SLOW_COPY if r % 8 else 0.0
    empty = max(0, tile.BLOCK_M - M) if moved or M > 6 * tile.BLOCK_M else -M % tile.BLOCK_M
    filled = FILLED * empty * tile.BLOCK_K / 64
    products = _waves(M, N, tile, steps, fit, gpu, filled=filled)
    return (
        copies
        + fit.start
        + _joined(products, (_bytes(M, N, K, r) + 2 * (max(1, weights) - 1) * N * K) / (gpu.bytes * fit.memory))
    )


def cublas_us(M: int, N: int, K: int, fit: CublasFit, gpu: Gpu) -> float:
    """x W alone."""
    best, memory = float("inf"), _bytes(M, N, K, 0) / (gpu.bytes * fit.memory)
    for bm, bn in _cublas_tiles(M, N, gpu.num_sms):
        reached = fit.most / (1 + fit.bytes_weigh * (1 / bm + 1 / bn))
        each = Fit(reached, fit.latency, fit.edge * bm * bn / 32768, 0, 1)
        for splits in SPLITS:
            if splits > 1 and (splits * LEAST_K > K or (splits - 1) * -(-M // bm) * -(-N // bn) > 2 * gpu.num_sms):
                break
            added = fit.split + fit.part * splits * M * N / 1e6 if splits > 1 else 0.0
            products = _waves(M, N, Tile(bm, bn, 64, 1), K / (64 * splits), each, gpu, splits) + added
            best = min(best, products)
    return fit.start + _joined(best, memory)


def _cublas_tiles(M: int, N: int, num_sms: int) -> Iterator[tuple[int, int]]:
    """Of rows those that leave few empty, and of columns beside them those that end with a wave."""
    least = -(-M // SIDES[-1])
    for bm in _sides([-(-M // strips) for strips in range(max(1, least), least + 4)]):
        strips = max(1, -(-M // bm))
        for bn in _sides([-(-N // (waves * num_sms // strips)) for waves in range(1, 5) if waves * num_sms >= strips]):
            if bm * bn <= LARGEST:
                yield bm, bn


def _sides(wanted: Iterable[int]) -> set[int]:
    eights = {8 * -(-side // 8) for side in wanted}
    return {*SIDES, *[side for side in eights if SIDES[0] <= side <= SIDES[-1]]}


def after_us(M: int, N: int, K: int, r: int, cublas: CublasFit, fit: PassFit, gpu: Gpu) -> float:
    """cuBLAS's product, and the pass behind it or ahead of it."""
    us = cublas_us(M, N, K, cublas, gpu) + pass_us(M, N, r, fit, gpu)
    return us * DOUBT if M in DOUBTED else us


def pass_us(M: int, N: int, r: int, fit: PassFit, gpu: Gpu) -> float:
    """What low rank, g and bias add where the product is there."""
    ranks, size = r / 64, M * N / 1e6 * (BY_CAPABILITY[90].bytes / 1e6 / gpu.bytes)
    return fit.start + fit.rank * ranks + size * (fit.size + fit.both * ranks)


def _waves(M: int, N: int, tile: Tile, steps: float, fit: Fit, gpu: Gpu, splits: int = 1, filled: float = 0.0) -> float:
    bm, bn, bk, together = tile
    tiles = -(-M // bm) * -(-N // bn) * splits
    share = -(-tiles // gpu.num_sms)
    waves = -(-share // together)
    idle = 1 - tiles / max(1, share * gpu.num_sms) if share <= 2 else 0.0
    step = 2 * bm * bn * bk / (gpu.flops * fit.reached) * (1 - ALONE * idle) + filled
    return max(share * steps * step, waves * steps * fit.latency) + waves * fit.edge


def _joined(a: float, b: float) -> float:
    return (a**4 + b**4) ** 0.25


def _bytes(M: int, N: int, K: int, r: int) -> int:
    return 2 * (M * K + K * N + M * N + (M + N) * r)
