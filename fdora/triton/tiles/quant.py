"""As configs.py, for a W of codes: its norm, and its dense copy."""

from __future__ import annotations

from typing import NamedTuple

from fdora.triton.tiles.configs import GROUP, power_of_two, span_of


class QuantConfig(NamedTuple):
    """As NormConfig; ``RUN``: how many tiles of the same rows a program walks, 0 for what run_of says. TMA brings A and B."""

    BLOCK_N: int
    BLOCK_K: int
    BLOCK_R: int
    PRECISION: str
    num_warps: int
    num_stages: int
    RUN: int = 0
    TMA: bool = False
    GROUP: int = GROUP


class StripConfig(NamedTuple):
    """Tile of W and slab of the rank of a program that walks along a strip of ``SPAN`` columns, with ``AHEAD`` tiles on their
    way. ``PROGRAMS``: on a multiprocessor, where they share the strips."""

    BLOCK_N: int
    BLOCK_K: int
    BLOCK_R: int
    num_warps: int
    AHEAD: int
    SPAN: int
    PROGRAMS: int = 4


def strip_config(r: int, columns: int, capability: int) -> StripConfig | None:
    """For 4-bit codes, A and B in half precision, up to r = 64 on Hopper.

    us on an H200, NF4, in strips of 512, 1024 and 2048 columns; the dense norm and runs of tiles in brackets. 4096 x 14336,
    r = 16: 31.3, 27.3, 29.2 (33.7, 39.6); r = 64, four tiles ahead: 41.0, 37.3, 40.1 (35.9, 50.2). 4096 x 4096: 12.4, 13.3,
    18.8 (12.6, 15.6); 14.5, 15.0, 18.2 (13.6, 17.4). Tiles of 128 rows or 128 columns take 3 to 20 % longer.
    """
    if not 90 <= capability < 100 or r > 64:
        return None
    return StripConfig(64, 64, power_of_two(r), 4, 3 if r <= 16 else 4, min(1024, span_of(columns)))


def run_of(tiles_n: int, tiles_k: int, num_sms: int) -> int:
    """The longest run of tiles along K, up to 8, that leaves three programs for two multiprocessors. 4096 x 4096 in runs of 8
    has 256 and takes 15.4 us on an H200, in runs of 4 16.4, of 2 18.0, of 1 21.4."""
    run = 8
    while run > 1 and 2 * tiles_n * -(-tiles_k // run) < 3 * num_sms:
        run //= 2
    return run


def quant_config(
    r: int, half: bool, capability: int, pairs: bool = True, wide: bool = False, aligned: bool = False, stores: bool = False
) -> QuantConfig:
    """The norm of a W of codes. ``pairs``: two 4-bit codes of a row to a byte, or one of 8 bits. ``wide``: 4 bits in groups of
    32 or more, and A and B not split into terms; else a large tile would spill, or move its scales. ``aligned``: A and B lie as
    TMA wants them. ``stores``: the dense W is written, too.

    us on an H200, NF4, r = 64, 14336 x 4096, in runs of 8 tiles: 64 x 128 by 4 warps 43, 64 x 64 47 (in runs of 4), 128 x 128
    by 8 warps 54, 64 x 128 by 8 warps 54 (in runs of 4); single tiles 60 to 100. With W stored 64 x 64 71, 64 x 128 79 to 86,
    others more. At r = 384 128 x 256 by TMA 99, with three stages 103, by pointers 108; 128 x 128 by pointers 113, in runs 139,
    by TMA 120 to 135.
    """
    if not half:
        return QuantConfig(64, 64, 32, "tf32x3" if capability else "ieee", 4, 2)
    if not pairs:  # an address of 64 bits for each code and for each scale
        return QuantConfig(64, 64, 32, "ieee", 8, 2)
    hopper = 90 <= capability < 100
    if r <= 64:
        return QuantConfig(64, 64 if stores and hopper else 128, min(64, power_of_two(r)), "ieee", 4 if hopper else 8, 3)
    if hopper and wide and not stores:
        return QuantConfig(128, 256, 64, "ieee", 8, 2 if aligned else 3, 1, aligned)
    return QuantConfig(128, 128, 32, "ieee", 8, 3, 1)


def within(block: int, group: int) -> int:
    """Columns of a tile that lies in a group of packed integers; as they are where groups are too short, or no power of two."""
    return min(block, group) if group >= 16 and group & (group - 1) == 0 else block


class DequantizeConfig(NamedTuple):
    """Tile of W; ``VECTOR``: how many bytes of codes a thread reads at once."""

    BLOCK_N: int
    BLOCK_K: int
    VECTOR: int
    num_warps: int


def dequantize_config(pairs: bool, itemsize: int, four: bool, group: int = 0) -> DequantizeConfig:
    """``pairs``: as of quant_config. ``itemsize``: of the dense W. ``four``: 4-bit codes. ``group``: of packed integers.

    Not measured on a GPU. A warp writes 512 bytes at once, and has four reads under way; a tile of 8-bit codes lies in one
    column of blocks of 128 x 128.
    """
    if group:  # columns of AWQ's words, rows of GPTQ's: 64 of either are whole sectors, read and written
        return DequantizeConfig(64, within(64, group), 16 // itemsize, 4)
    if not pairs:
        return DequantizeConfig(16, 64, 1, 4)
    if four:
        return DequantizeConfig(16, 512 // itemsize, 8 // itemsize, 4)
    return DequantizeConfig(64 // itemsize, 128, 16 // itemsize, 4)
