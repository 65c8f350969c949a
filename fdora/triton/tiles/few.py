"""Which of two ways few tokens take: one pass over W by narrow tiles (small.py), or the product of many tokens (product.py).

The first starts two kernels in the place of four or more. A program takes BLOCK_K rows of its columns at a step, and the
tokens, filled up to a power of two, beside them: that many bytes a multiprocessor takes in at ``of_one``, and the warps of a
program at ``of_warp`` each. So columns must be enough for all multiprocessors, and tokens few beside a program's columns.
Time in us, of all steps of the programs that follow one another, and of the bytes of W:

    start + max( W / memory, waves steps max( together bytes / of_one, bytes / (warps of_warp) ) ) + waves (edge + rank r M)

The other way is that of choice.py and what is launched around it: h, whose product is longer with K; in backward the pass, dh
and the factors' gradients, all longer with the layer's sides and the last two with the rank. ``start`` counts backward's pass
on this side. The numbers are fitted (tiles/few.json, by ``bench.fit_few``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fdora.triton.runtime.device import cdiv
from fdora.triton.tiles import measured
from fdora.triton.tiles.configs import power_of_two, small_config
from fdora.triton.tiles.product import Ask, product_way
from fdora.triton.tiles.waves import Gpu, gpu_of

LIMIT = 64  # tokens; above, no narrow tile was written
SHARED = 227_000  # bytes of a multiprocessor


class NarrowFit(NamedTuple):
    """of_one and of_warp: bytes a us; edge, and ``start`` of forward and backward: us; rank: us for 64 of it and 64 tokens."""

    memory: float  # of the published bandwidth
    of_one: float
    of_warp: float
    edge: float
    forward: float
    backward: float
    rank: float


class BesideFit(NamedTuple):
    """us around the other way's product: ``h`` + ``of_K`` K / 1000 forward, ``back`` + (``of_sides`` + ``of_rank`` r / 64)
    (N + K) / 1000 backward."""

    h: float
    of_K: float
    back: float
    of_sides: float
    of_rank: float


NARROW, BESIDE = NarrowFit(**measured("few")["narrow"]), BesideFit(**measured("few")["beside"])


@lru_cache(4096)
def takes_narrow_tiles(M: int, N: int, K: int, r: int, trans_b: bool, tma: bool, capability: int, num_sms: int) -> bool:
    """(M, K) times (K, N). ``trans_b``: the columns of W are contiguous (forward)."""
    if M > LIMIT or not N * K or not 90 <= capability < 100:  # other GPUs have other narrow tiles, which nobody has timed
        return M <= LIMIT
    way = product_way(Ask(M, N, K, r, trans_b, False, tma, capability, num_sms))
    narrow = narrow_us(M, N, K, r, trans_b, NARROW, gpu_of(capability, num_sms), capability)
    return narrow <= way.us + beside_us(N, K, r, trans_b, BESIDE)


def narrow_us(M: int, N: int, K: int, r: int, trans_b: bool, fit: NarrowFit, gpu: Gpu, capability: int) -> float:
    rows = power_of_two(M)
    block_n, block_k, warps, stages = small_config(rows, N, K, not trans_b, capability, gpu.num_sms)
    taken = 2 * block_k * (rows + block_n)  # bytes of a step
    fits = max(1, SHARED // (stages * taken))  # programs of one multiprocessor
    programs = cdiv(N, block_n)
    together, waves = min(fits, cdiv(programs, gpu.num_sms)), cdiv(programs, gpu.num_sms * fits)
    step = max(together * taken / fit.of_one, taken / (warps * fit.of_warp))
    run = max(2 * N * K / (fit.memory * gpu.bytes), waves * cdiv(K, block_k) * step)
    return (fit.forward if trans_b else fit.backward) + run + waves * (fit.edge + fit.rank * r * rows / 64**2)


def beside_us(N: int, K: int, r: int, trans_b: bool, fit: BesideFit) -> float:
    if trans_b:
        return fit.h + fit.of_K * K / 1000
    return fit.back + (fit.of_sides + fit.of_rank * r / 64) * (N + K) / 1000
