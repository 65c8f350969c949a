"""Which tile a kernel uses: a table as data, chosen by a pure function of the shape and the GPU. Nothing is timed at run time.

The norm, measured on an H100 in bf16 (`python -m bench.norm_forms --device cuda`; results in bench/results). Of single tiles
those of 128 x 128 with 4 warps won up to r = 64: two programs share a multiprocessor, and one's squares hide behind the
other's products. On Hopper strips (`python -m bench tune norm`) are faster up to r = 128, where one slab holds the rank.
Above, TMA feeds the same tile faster than pointers feed any (8192 x 8192, r = 384: 113 us against 125). Where it cannot be
used, 128 x 256 with 8 warps: each slab that comes through L2 feeds twice the products (125 us against 134).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, TypeVar

from fdora.triton.tiles import measured

T = TypeVar("T")
MAX_N, MIN_K = 128, 64  # the tallest and the narrowest tile of any norm
GROUP = 8  # rows of tiles that run together, so that their slabs of A and B meet in L2


def power_of_two(n: int) -> int:
    """The next one, at least 16: what tl.dot asks of its axes."""
    return max(16, 1 << (n - 1).bit_length()) if n > 1 else 16


class NormConfig(NamedTuple):
    """Tile of W, slab of the rank, and how a program runs. ``AHEAD``: tiles of W on their way in a strip of ``SPAN`` columns,
    whose B is read once; 0 for single tiles and all slabs of the rank. ``PROGRAMS``: on a multiprocessor, where they walk."""

    BLOCK_N: int
    BLOCK_K: int
    BLOCK_R: int
    PRECISION: str
    num_warps: int
    num_stages: int
    TMA: bool = False
    AHEAD: int = 0
    SPAN: int = 0
    PROGRAMS: int = 2
    GROUP: int = GROUP


def norm_config(
    r: int, half: bool, capability: int, aligned: bool = False, half_weight: bool = True, columns: int = 0
) -> NormConfig:
    """``half``: both operands of the product are float16 or bfloat16. ``capability``: 90 for an H100, 0 if not NVIDIA.
    ``half_weight``: W is half precision. ``aligned``: it is, and W, A and B lie as TMA wants them (and so does what a merge
    writes). ``columns``: of W, where strips may be walked along.

    Strips, us on an H200, the bytes of W and single tiles in brackets: r = 8, 24832 x 8832 111 (104, 169); 4096 x 4096, r =
    16 12.1 (7.9, 16.2), r = 64 13.0 (18.3); 4096 x 14336, r = 64 40.9 (27.8, 53.7); r = 96, 3840 x 15360 46 (27.9, 65.6).
    """
    if not half:  # float32 digits: three tf32 products, and registers to split the operands
        return NormConfig(64, 64, 32, "tf32x3" if capability else "ieee", 4, 2)
    # Hopper and data-centre Blackwell multiply out of shared memory; others hold the operands in registers too, and
    # 4 warps would spill.
    from_shared = 90 <= capability < 120
    if not half_weight:  # twice the registers for the tile of W
        return NormConfig(128, 128, 64 if from_shared and r > 64 else 32, "ieee", 8, 3)
    if columns and 90 <= capability < 100 and r <= 128:
        block_n, num_warps, programs = (64, 4, 8) if r <= 64 else (128, 8, 2)
        return NormConfig(block_n, 64, power_of_two(r), "ieee", num_warps, 3, AHEAD=3, SPAN=span_of(columns), PROGRAMS=programs)
    if from_shared and r > 64:
        return NormConfig(128, 256, 64, "ieee", 8, 3, TMA=aligned, PROGRAMS=1 if aligned else 2)
    return NormConfig(128, 128, 16 if r <= 16 else 32, "ieee", 4 if 90 <= capability < 100 else 8, 3)


def span_of(columns: int) -> int:
    """A power of two that makes six strips or more. By the columns alone: a row's norm does not depend on the others, but on
    whether 16 divides their number."""
    return max(256, min(2048, 1 << (max(1, columns // 6).bit_length() - 1)))


class TreeConfig(NamedTuple):
    """Tile of W and slab of the rank, for the norms of many layers in one launch. ``AHEAD``: how many tiles of W are on their
    way where one slab holds the rank, 0 for what the compiler does; ``PROGRAMS``: on a multiprocessor, at most."""

    BLOCK_N: int
    BLOCK_K: int
    BLOCK_R: int
    num_warps: int
    num_stages: int
    AHEAD: int = 0
    PROGRAMS: int = 2


def tree_config(r: int, half: bool, half_weight: bool, whole: bool, capability: int) -> TreeConfig:
    """``half``: A and B are half precision; float32 ones are split into float16 terms in registers. ``whole``: all rows begin
    at 16 bytes, and N and K are multiples of 128; else every element of a tile has an address and a mask of its own.

    ms on an H200, the seven layers of a block of Llama-3.1-8B (h200/norm_model_tiles.json). r = 64, where one slab holds the
    rank, so that the loop over tiles can bring W ahead: 64 x 64 with three tiles of W 0.130 (four 0.137, none 0.158), 128 x 64
    0.134, 128 x 128 by 8 warps 0.145; 128 x 128 in slabs of 32, of which one program finds room, 0.269. r = 16: 64 x 64 with
    four 0.117, with three 0.119, 128 x 128 with none 0.131. r = 384: 64 x 128 0.524, 128 x 64 0.557, 128 x 128 by 8 warps
    0.612, in slabs of 32 0.689; r = 128: 0.269, 0.288, 0.330, 0.340, and in one slab with three tiles of W ahead 128 x 64 by 8
    warps 0.161, 64 x 64 0.184 (h200/norm_model_128.json).

    float32 A and B there, of three products: r = 16 128 x 64 0.175, 64 x 64 0.179; r = 32 0.221, 0.257; r = 64 128 x 64 by 4
    warps with three of W ahead 0.306, by 8 0.379, 128 x 128 0.405; r = 128 128 x 64 by 8 warps 0.632, 64 x 64 0.680, 128 x 128
    in slabs of 32 0.749; r = 384 128 x 128 in slabs of 32 1.77, of 64 1.71, but that spills.
    """
    if not whole:
        return TreeConfig(64, 64, 16, 8, 2)
    if half and half_weight and 90 <= capability < 100:
        if r <= 64:
            return TreeConfig(64, 64, max(16, power_of_two(r)), 4, 3, 4 if r <= 16 else 3, 8)
        if r <= 128:
            return TreeConfig(128, 64, 128, 8, 3, 3, 2)
        if r % 64 == 0:
            return TreeConfig(64, 128, 64, 4, 3, 0, 4)
    if half_weight and 90 <= capability < 100:
        if r <= 64:
            return TreeConfig(128, 64, max(16, power_of_two(r)), 4, 3, 3, 4)
        if r <= 128:
            return TreeConfig(128, 64, 128, 8, 3, 3, 2)
        if r % 32 == 0:
            return TreeConfig(128, 128, 32, 8, 3, 0, 4)
    block_r = 32 if r % 32 == 0 or (half and r > 16) else 16  # masks of a wide slab beside the split would spill
    if half and half_weight:
        return TreeConfig(128, 128, block_r, 8, 3)
    return TreeConfig(64, 128, block_r, 8, 2)


class GemmConfig(NamedTuple):
    """Tile of the result, step along K, how programs run. ``EPILOGUE_SUBTILE``: it leaves through shared memory in two."""

    tma: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    EPILOGUE_SUBTILE: bool
    persistent: bool
    num_warps: int
    num_stages: int


class RestConfig(NamedTuple):
    """Tile of what is added to a product that is there, and slab of the rank."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_R: int
    num_warps: int
    num_stages: int


def rest_config(r: int) -> RestConfig:
    """With few slabs the loop over the rank ends soon; on an H200 (bench/NOTES.md) the pass costs what bare h B^T costs."""
    return RestConfig(64, 128, min(64, power_of_two(r)), 4, 3)


class ScaleConfig(NamedTuple):
    """Tile and strip of backward's elementwise pass; ``BLOCK_R``: the padded rank of the dB formed on the same tiles, or 0.
    ``STAGES``: tiles that are under way at once; 1 leaves that to the programs beside each other."""

    BLOCK_M: int
    BLOCK_N: int
    ROWS: int
    BLOCK_R: int
    num_warps: int
    STAGES: int = 1


@lru_cache(4096)
def scale_config(M: int, N: int, r: int, half: bool, capability: int, with_dB: bool = True, long: int = 0) -> ScaleConfig:
    """From h200/passes.json. 64 x 64 with three tiles under way moves bytes at 0.83 to 0.9 of the rate of torch's sum of two
    tensors where they fill the GPU; up to 256 tokens, and up to 512 beside many columns, one strip needs no second kernel.
    ``with_dB``: it may be formed here; in strips as ``long`` as that, if any."""
    if M <= 64:
        block_r = _block_r(r, half) if with_dB else 0
        return ScaleConfig(min(32, power_of_two(M)), 64 if half else 32, 64, block_r, 4)
    if not half or not 90 <= capability < 120:  # twice the registers, or half of them left: a small tile, and dB apart
        return ScaleConfig(32, 64, 128, 0, 4)
    if long and with_dB:
        return ScaleConfig(64, 64, long, _block_r(r, half), 4, 3)
    # Beside few elements dB costs less than a product of its own; one of ranks that cuBLAS cannot load at once is slow.
    block_r = _block_r(r, half) if with_dB and M * N * power_of_two(r) <= (1e8 if r % 8 == 0 else 4e8) else 0
    rows = _strip(M, N)
    return ScaleConfig(32, 64, max(256, rows), block_r, 4, 3) if block_r else ScaleConfig(64, 64, rows, 0, 4, 3)


def _strip(M: int, N: int) -> int:
    """Rows of a strip, for columns in tiles of 64 and some 130 multiprocessors."""
    if M <= 256:
        return 256
    if M <= 512 and N >= 8192:
        return 512
    return 128 if M > 2048 or -(-M // 256) * -(-N // 64) < 130 else 256


def long_strip(M: int, N: int, r: int, half: bool, capability: int) -> int:
    """Rows of strips in which a pass that writes no dz forms dB of many tokens too, 0 where it does not. dy is read once less,
    and the parts of dB are few; shorter strips write many, longer ones leave multiprocessors idle. Forward and backward of a
    layer, of its bare products, dB apart and in strips of 1024 and 2048 (bench/NOTES.md): 8192 tokens, 2048 -> 8192, r = 64
    1.059, 1.039 and 1.029; 7225, 768 -> 24448, r = 64 1.137, 1.107 and 1.086. Beside dz it is no gain."""
    if not half or not 90 <= capability < 100 or r > 64:  # sums of more ranks would fill the registers; others are not measured
        return 0
    return next((rows for rows in (2048, 1024) if rows < M and -(-M // rows) * -(-N // 64) >= 256), 0)


def _block_r(r: int, half: bool) -> int:
    return power_of_two(r) if half and r <= 64 else 0


class SmallConfig(NamedTuple):
    """Columns and step along K for up to 64 tokens."""

    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# by whether neighbours in memory are columns of W, and by (tokens, N, K)
SMALL = {
    columns: {(each["tokens"], each["N"], each["K"]): SmallConfig(**each["tile"]) for each in measured("small")[side]}
    for columns, side in ((True, "columns"), (False, "rows"))
}


@lru_cache(4096)
def small_config(rows: int, N: int, K: int, columns: bool, capability: int, num_sms: int) -> SmallConfig:
    """``rows``: tokens, padded. ``columns``: neighbours in memory are columns of W (backward). Of the measured tiles those
    that leave a second wave less than half full are left out: 64 tokens, 9344 x 9344 took 1.29 of the bare products so."""
    if capability < 80:
        return SmallConfig(32, 64, 4, 2)
    if not 90 <= capability < 100:  # less shared memory, or fewer registers left, than where the table was measured
        return SmallConfig(32, 64, 4, 3)
    table = {shape: tile for shape, tile in SMALL[columns].items() if not 1 < -(-N // tile.BLOCK_N) / max(1, num_sms) < 1.5}
    return nearest(table or SMALL[columns], (rows, N, K))


def small_norm_config(N: int, capability: int, num_sms: int) -> SmallConfig:
    """The same with the norm beside it, whose squares are as large as the tile of W. us on an H200, 16 tokens, r = 16, 32 x 128
    and 64 x 64: 4096 x 4096 20 and 31, 14336 -> 4096 55 and 92; 4096 -> 14336 55 and 46, 128 x 64 by 8 warps 44; 2304 -> 22144
    52, 39 and 52. 64 tokens, 9344 x 9344, r = 32: 64 x 64, whose second wave is nearly empty, 105, 128 x 64 97
    (h200/few_inside.json)."""
    if not capability:
        return SmallConfig(32, 64, 4, 2)
    if 64 * num_sms >= N:
        return SmallConfig(32, 128, 4, 4)
    return SmallConfig(128, 64, 8, 4) if 128 * num_sms >= N else SmallConfig(64, 64, 4, 4)


def nearest(table: dict[tuple, T], shape: tuple[int, ...]) -> T:
    """The entry whose shape is closest, in factors of two summed over the axes; the first of equals."""

    def distance(entry: tuple[tuple, T]) -> float:
        return sum(abs(math.log2(a / max(1, b))) for a, b in zip(entry[0], shape, strict=True))

    return min(table.items(), key=distance)[1]


def merge_config(
    r: int, half: bool, capability: int, aligned: bool = False, half_weight: bool = True, plain: bool = True
) -> NormConfig:
    """With pointers the tile of the norm up to r = 64, for any r: the bytes of the result weigh more than those of A and B.
    With 4 warps the stores spill. ``plain``: no split factors, nothing undone."""
    if half and aligned and half_weight and 90 <= capability < 120:
        # us on an H100 (pointers): 8192 x 8192, r = 384 163 (264); 14336 x 4096, r = 64 98 (120); 4096 x 4096, r = 16 32 (36)
        wide = r <= 64 and capability < 100 and plain  # it spills elsewhere
        return NormConfig(128, 256 if wide else 128, 32 if wide else 64, "ieee", 8, 3 if wide else 4, TMA=True)
    config = norm_config(min(r, 64), half, capability)
    return config._replace(num_warps=8, BLOCK_K=128 if half_weight else 64) if half else config
