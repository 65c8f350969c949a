"""Tiles for up to 64 tokens and a W of codes, as pure functions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fdora.triton.tiles.configs import power_of_two


class CodesConfig(NamedTuple):
    """Tile for up to 64 tokens and a W of codes: columns of the result, terms at once, how many warps share it, and into how
    many parts K is split among programs."""

    BLOCK_N: int
    BLOCK_K: int
    SLICES: int
    num_warps: int
    num_stages: int
    SPLITS: int = 1


class PartsConfig(NamedTuple):
    """Tile of the kernel that adds the parts of x W and the rest; AHEAD: all of its B is asked for before it waits."""

    BLOCK_N: int
    BLOCK_R: int
    AHEAD: bool
    num_warps: int


def parts_config(M: int, r: int, columns: bool) -> PartsConfig:
    """Slab by slab B takes one trip to memory after the other. ``r`` is 0 where h B is a part itself."""
    if M <= 16 and 0 < r <= 64 and not columns:
        return PartsConfig(64, power_of_two(r), True, 4)
    return PartsConfig(64 if M <= 16 else 32, min(64, power_of_two(r)), False, 4)


@lru_cache(4096)
def small_codes_config(
    rows: int, N: int, K: int, bits: int, columns: bool, capability: int, num_sms: int, words: str = ""
) -> CodesConfig:
    """``rows``: tokens, padded. ``columns``: the result has the columns of W (backward), and K counts its rows. ``words``: the
    code of packed integers of 4 bits. A word of AWQ is of eight rows of W, all others are of columns.

    sm_90, NF4, from the run h200/quant_forms: 64 columns by four warps, whose products wgmma takes, and as
    many splits as give each multiprocessor several programs, which hide the waits of one another; each split costs what it
    writes and what is read again. ms for 16 tokens, 4096 x 4096 / 14336 x 4096: 0.013 / 0.029; by slices inside of one program
    0.028 / 0.089. Backward: 512 columns, since a row of W is read in one piece. Elsewhere, and for packed integers, by count:
    these fit, nothing spills.
    """
    along_n = columns != (words == "awq")
    if not capability:  # interpreted, or an AMD GPU, with 64 KiB of shared memory
        return CodesConfig(64, 16, 1, 4, 2) if along_n else CodesConfig(16, 128, 1 if rows > 16 else 2, 2, 2)
    hopper = 90 <= capability < 100
    if hopper and columns and bits == 4:
        config = CodesConfig(512, 32, 1, 4, 3) if rows <= 32 else CodesConfig(256, 32, 1, 4, 4)
        most = min(16, max(4, K // 512), max(1, K // config.BLOCK_K))
        return config._replace(SPLITS=split_of(2 * num_sms, -(-N // config.BLOCK_N), most))
    wide = hopper and not columns and words[:4] in ("awq", "gptq")
    if wide and along_n:  # a thread has eight rows, a whole word
        config = CodesConfig(256, 64 if rows <= 32 else 32, 1, 4, 4)
    elif wide:  # 64 rows would have fewer scales than threads, and codes go through shared memory then
        config = CodesConfig(128, 64, 1, 4, 4)
    elif along_n:
        config = CodesConfig(64, 32 if hopper else 16, *((4, 4) if rows > 32 else (8, 8)), 3)
    elif hopper and bits == 4 and rows > 32 and N >= 8192:
        config = CodesConfig(128, 128, 1, 8, 3)
    elif hopper:
        config = CodesConfig(64, 128, 1, 4, 4 if rows <= 32 else 3)
    elif rows > 32:
        config = CodesConfig(32, 128, 1, 2, 2)
    elif rows > 16:
        config = CodesConfig(16, 128, 4, 4, 2)
    elif N >= 8192:
        config = CodesConfig(32, 128, 4, 4, 2)
    else:
        config = CodesConfig(16, 128, 4 if K < 4096 else 8, 4 if K < 4096 else 8, 2)
    programs = (7 if rows <= 32 else 3.5) if hopper else 1  # for each multiprocessor
    # Parts are written and read again: no more bytes than codes have, and a program has two steps at least. Tiles of 256
    # columns are few, and would leave half of the GPU idle at 64 tokens: twice as many bytes.
    tokens = (8 if wide and along_n else 16) * rows
    most = min(16 if wide else 8, max(1, K // max(tokens, 2 * config.BLOCK_K * config.SLICES)))
    return config._replace(SPLITS=split_of(int(programs * num_sms), -(-N // config.BLOCK_N), most))


def split_of(programs: int, tiles: int, most: int) -> int:
    """The largest power of two, up to ``most``, with which tiles make no more programs than that."""
    splits = 1
    while 2 * splits <= most and 2 * splits * tiles <= programs:
        splits *= 2
    return splits
