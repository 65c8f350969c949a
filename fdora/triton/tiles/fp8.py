"""Which tile a product of 8-bit codes takes, and whether there is one: a pure function of the shape and the GPU.

A step of 128 columns of codes brings as many bytes as one of 64 in half precision, and takes the tensor cores as long. So a
tile takes of K columns what it takes of K / 2 there, by the model and the numbers of product.py. But 128 x 128 brings a third
more than 128 x 256 for as many products, which codes feel: us on an H200, 4096 tokens, r = 64, 4096 x 4096 114 and 106, 4096 ->
14336 427 and 380, 14336 -> 4096 366 and 325.

With scales of blocks the sum is multiplied between two steps, while the tensor cores wait: two programs on a multiprocessor do
that in turns. 4096 x 4096: 141 us by two of 128 x 128, 170 by two of 64 x 128, 174 to 197 by one of 128 x 128 or 256 x 128.

Few tokens, forward, r = 16, us on an H200 by such a product and by the codes read as they are: 4096 -> 14336 with scales of
rows 30 and 58 (64 tokens), 30 and 33 (32), 31 and 29 (16), of blocks 33 and 59, 34 and 35, 33 and 29; 4096 x 4096 17 and 21,
17 and 17, 18 and 12, of blocks 27 and 21, 27 and 18, 27 and 12.
"""

from __future__ import annotations

from functools import lru_cache

from fdora.triton.tiles.configs import GemmConfig, power_of_two
from fdora.triton.tiles.few import LIMIT
from fdora.triton.tiles.product import FUSED, SHARED, Ask, grouped_config, together
from fdora.triton.tiles.waves import Fit, Tile, fused_us, gpu_of

# BLOCK_M, BLOCK_N, warps, and a share of the rate there: of programs that walk over tiles, and of two that share an SM
ALONE = ((128, 256, 8, 1.0), (128, 128, 4, 0.87))
TWO = ((128, 128, 4, 1.0), (64, 128, 4, 1.0), (64, 64, 4, 1.0))
POINTERS = GemmConfig(False, 64, 128, 128, 8, False, False, 8, 3)
RANKS = 64  # of a slab
FEW = 32  # tokens of one layer whose W has scales of rows, or one scale


def fp8_config(of: Ask, rows: int, columns: int, few: int = LIMIT) -> GemmConfig | None:
    """None: W is decoded, and products are in the dtype of x. W has a scale for so many ``rows`` and ``columns``, 0 for all.
    The codes of W are read as they are for so ``few`` tokens."""
    by_tma = 90 <= of.capability < 120
    most = few if by_tma and of.tma and not columns else LIMIT
    if most >= of.M:
        return None
    if not by_tma:
        return POINTERS if of.tma else POINTERS._replace(BLOCK_N=64)  # else an address for each element, in registers
    if not of.tma or (columns and rows % 128):
        return None
    return _fastest(of, columns > 0)


@lru_cache(4096)
def grouped_fp8(of: Ask, groups: int, rows: int, columns: int) -> GemmConfig | None:
    """Of a product where each group of rows has a W of its own, which is never decoded where it lies as TMA wants. The tile of
    half the columns in half precision: no GPU has timed it."""
    if not of.tma or not 90 <= of.capability < 120 or (columns and (rows % 128 or columns % 128)):
        return None
    found = grouped_config(of._replace(K=of.K // 2), groups)
    stages = found.num_stages * found.BLOCK_K // 64
    found = found._replace(BLOCK_K=128, persistent=False, num_stages=min(6, stages))
    return found._replace(BLOCK_M=min(128, found.BLOCK_M), BLOCK_N=min(128, found.BLOCK_N)) if columns else found


@lru_cache(4096)
def _fastest(of: Ask, blocks: bool) -> GemmConfig:
    gpu = gpu_of(of.capability, of.num_sms)

    def us(item: tuple[GemmConfig, Fit]) -> float:
        bm, bn, bk = item[0][1:4]
        return fused_us(of.M, of.N, of.K // 2, of.r, Tile(bm, bn, bk // 2, together(item[0])), item[1], gpu)

    return min(tiles(of.r, blocks, of.capability).items(), key=us)[0]


@lru_cache(16)
def tiles(r: int, blocks: bool, capability: int) -> dict[GemmConfig, Fit]:
    """All that may be chosen. On sm_100 the largest would spill."""
    large = capability >= 100
    found = {}
    for persistent, sides in ((True, () if blocks or large else ALONE), (False, TWO if blocks and not large else TWO[1:])):
        for bm, bn, warps, share in sides:
            fit = next(fit for config, fit in FUSED[True].items() if config[1:3] == (bm, bn))
            halves, slab = bn > 64, min(RANKS, power_of_two(r)) if persistent and r <= RANKS else 0
            beside = 2 * bm * bn // (2 if halves else 1) + 2 * slab * (bm + bn) + 1024
            stages = (SHARED // (1 if persistent else 2) - beside) // (128 * (bm + bn))
            found[GemmConfig(True, bm, bn, 128, 8, halves, persistent, warps, min(6, stages))] = fit._replace(
                reached=share * fit.reached
            )
    return found
