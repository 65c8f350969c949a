"""Which way a product with a low-rank term takes, and by which tile: the least time by the model of waves.py.

The tiles and their numbers on Hopper are in tiles/products.json. Data-centre Blackwell takes the same by its own rate and
number of multiprocessors, without those that would spill there. Where there is no TMA, pointers bring the tiles, by numbers
that are not measured but those of tiles as large.

Where `fdora tune` measured this GPU, the model's times are multiplied by its factors. Another way than the model's must then
take less than its time by NOISE, else nothing changes; and both must have been measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fdora._tuned import class_of, factors_of
from fdora.triton.tiles import measured
from fdora.triton.tiles.configs import GemmConfig
from fdora.triton.tiles.waves import CublasFit, Fit, PassFit, Tile, after_us, fused_us, gpu_of

SIDES = {trans_b: measured("products")[side] for trans_b, side in ((True, "forward"), (False, "backward"))}


def _tiles(measured_ones: list[dict[str, Any]], tma: bool) -> dict[GemmConfig, Fit]:
    return {GemmConfig(tma, **each["tile"]): Fit(**each["fit"]) for each in measured_ones}


FUSED = {trans_b: _tiles(side["fused"], True) for trans_b, side in SIDES.items()}
POINTERS = _tiles(measured("pointers")["fused"], False)
CUBLAS = {trans_b: CublasFit(**side["cublas"]) for trans_b, side in SIDES.items()}
# a pass for the rest follows cuBLAS, or cuBLAS adds to the low-rank term
PASSES = {
    trans_b: {kind: PassFit(**side[kind]) for kind in ("after", "first") if kind in side} for trans_b, side in SIDES.items()
}
SHORT = 512  # tokens of an adapter, in the mean: a tile of 256 rows then has the terms of several
SHARED = 232_448  # bytes of a multiprocessor of sm_90 and sm_100
# On sm_100 another tile beside the one that is summed up would spill above 64 x 128 with 4 warps, and with six stages.
WITH_ANOTHER_TILE = (128, 128, 64, 8, False, True, 8, 4)
NOISE = 1.03


class Ask(NamedTuple):
    """A product (M, K) (K, N) with (M, r) (r, N) beside it, and a GPU. ``trans_b``: the columns of W are contiguous (forward).
    ``extra``: one more tile is read or written at the end. ``tma``: all operands lie as TMA wants them.
    ``table``: g differs from row to row."""

    M: int
    N: int
    K: int
    r: int
    trans_b: bool
    extra: bool
    tma: bool
    capability: int
    num_sms: int
    table: bool = False


class Way(NamedTuple):
    """``kind``: "fused", "after" (a pass for the rest follows cuBLAS) or "first" (cuBLAS adds to the low-rank term)."""

    kind: str
    tile: GemmConfig | None  # of a fused product
    us: float  # by the model
    tuned: bool = False  # what a file of `fdora tune` decided

    @property
    def name(self) -> str:
        """That of its factor. One more tile takes a stage, which changes no name."""
        if self.tile is None:
            return self.kind
        return " ".join(["TMA" if self.tile.tma else "pointers", *map(str, self.tile[1:-1])])


def best(ways: Sequence[Way], factors: Mapping[str, float]) -> Way:
    """The first of the least time by the model, or what factors say is faster."""
    usual = min(ways, key=lambda way: way.us)
    if usual.name not in factors:
        return usual
    known = [way._replace(us=way.us * factors[way.name], tuned=True) for way in ways if way.name in factors]
    found = min(known, key=lambda way: way.us)
    return found if found.us * NOISE <= usual.us * factors[usual.name] else usual


def _best(of: Ask, ways: Sequence[Way]) -> Way:
    return best(ways, factors_of(of.capability, of.num_sms).get(class_of(of.trans_b, of.M), {}))


def ways_of(of: Ask) -> list[Way]:
    """All that may be taken."""
    gpu, cublas = gpu_of(of.capability, of.num_sms), CUBLAS[of.trans_b]
    return _fused(of) + [Way(kind, None, after_us(*of[:4], cublas, fit, gpu)) for kind, fit in PASSES[of.trans_b].items()]


@lru_cache(4096)
def product_way(of: Ask) -> Way:
    return _best(of, ways_of(of))


@lru_cache(4096)
def fused_config(of: Ask) -> GemmConfig:
    """The fastest tile of one product with everything inside."""
    return _tile(of, _fused(of))


def _tile(of: Ask, ways: list[Way]) -> GemmConfig:
    tile = _best(of, ways).tile
    assert tile is not None
    return tile


@lru_cache(4096)
def bank_config(of: Ask, adapters: int) -> GemmConfig:
    """The same beside a bank, where a whole tile of 128 x 128 by 4 warps spills. Of one call (h200/multi_forms.json, forward of
    32 adapters of rank 16, 4096 x 4096 and 14336): in halves 1.12 and 1.07, 256 x 128 by 8 warps 1.06 and 1.07, 128 x 256 1.03
    and 1.04."""
    return _tile(of, _fused(of._replace(table=True), most=128 if SHORT * adapters > of.M else 256))


@lru_cache(4096)
def grouped_config(of: Ask, groups: int) -> GemmConfig:
    """The same where each group of rows has a W of its own. A group ends in the middle of a tile, so each costs half of one
    more; the rows that leave at its end go by pointers, another tile in shared memory. Not fitted: the numbers are those of
    one W."""
    return _tile(of, _fused(of._replace(extra=True), groups))


def _fused(of: Ask, groups: int = 0, most: int = 256) -> list[Way]:
    M, N, K, r, trans_b, extra, tma, capability, num_sms, table = of
    found = tiles(trans_b, extra, tma and 90 <= capability < 120, capability)
    if table:
        found = {c: fit for c, fit in found.items() if most >= c.BLOCK_M and not _fills_registers(c)}
    if groups and not trans_b:  # what a tile reads of the next matrix must not be summed up: 0 times a NaN is one
        inside = {config: fit for config, fit in found.items() if not config.tma or K % config.BLOCK_K == 0}
        found = inside or tiles(trans_b, extra, False, capability)
    adds = extra and not trans_b and not groups  # onto the dx of another layer
    gpu, ways = gpu_of(capability, num_sms), []
    for config, fit in found.items():
        rows, tile = M + groups * config.BLOCK_M // 2, Tile(*config[1:4], together(config))
        ways.append(Way("fused", config, fused_us(rows, N, K, r, tile, fit, gpu, groups, not adds)))
    return ways


@lru_cache(16)
def tiles(trans_b: bool, extra: bool, tma: bool, capability: int) -> dict[GemmConfig, Fit]:
    """All that may be chosen."""
    if not tma:
        return POINTERS
    found = FUSED[trans_b]
    if extra and capability >= 100:
        large = [config for config in found if config.BLOCK_M * config.BLOCK_N > 8192]
        replaced = max((found[config] for config in large if config.BLOCK_M == config.BLOCK_N), default=found[large[0]])
        found = {c._replace(num_stages=min(5, c.num_stages)): fit for c, fit in found.items() if c not in large}
        return found | {GemmConfig(True, *WITH_ANOTHER_TILE): replaced}
    if extra:  # shared memory holds a stage less, or another tile
        return {_with_room(config): fit for config, fit in found.items()}
    return found


def _with_room(config: GemmConfig) -> GemmConfig:
    while config.num_stages > 1 and _shared(config, tiles=2) > SHARED:
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def _shared(config: GemmConfig, tiles: int = 1) -> int:
    """Bytes of shared memory, with so many tiles of the result on their way."""
    _, block_m, block_n, block_k, _, subtile, _, _, stages = config
    return 2 * stages * block_k * (block_m + block_n) + tiles * 2 * block_m * block_n // (2 if subtile else 1)


def _fills_registers(config: GemmConfig) -> bool:
    """Whether the sums of a whole tile leave by 4 warps at once."""
    return config.num_warps == 4 and config.BLOCK_M * config.BLOCK_N >= 128 * 128 and not config.EPILOGUE_SUBTILE


@lru_cache(64)
def together(config: GemmConfig) -> int:
    """Programs that share a multiprocessor: two of those that do not walk over tiles, where their memory leaves room."""
    return 2 if not config.persistent and _shared(config) <= SHARED // 2 else 1
