"""Which tile a kernel uses: a table as data, chosen by a pure function of the shape and the GPU. Nothing is timed at run time.

Measured on an H100 in bf16 (`python -m bench.norm_forms --device cuda`; results in bench/results). Up to r = 64 tiles of
128 x 128 with 4 warps won: two programs share a multiprocessor, and one's squares hide behind the other's products. Above,
TMA feeds the same tile faster than pointers feed any (8192 x 8192, r = 384: 113 us against 125). Where it cannot be used,
128 x 256 with 8 warps: each slab that comes through L2 feeds twice the products (125 us against 134).
"""

from __future__ import annotations

from typing import NamedTuple

MAX_N, MIN_K = 128, 64  # the tallest and the narrowest tile of any norm


class NormConfig(NamedTuple):
    """Tile of W, slab of the rank, and how a program runs."""

    BLOCK_N: int
    BLOCK_K: int
    BLOCK_R: int
    PRECISION: str
    num_warps: int
    num_stages: int
    TMA: bool = False


def norm_config(r: int, half: bool, capability: int, aligned: bool = False, half_weight: bool = True) -> NormConfig:
    """``half``: both operands of the product are float16 or bfloat16. ``capability``: 90 for an H100, 0 if not NVIDIA.
    ``aligned``: W, A and B are half precision and lie as TMA wants them. ``half_weight``: W is half precision."""
    if not half:  # float32 digits: three tf32 products, and registers to split the operands
        return NormConfig(64, 64, 32, "tf32x3" if capability else "ieee", 4, 2)
    # Hopper and data-centre Blackwell multiply out of shared memory; others hold the operands in registers too, and
    # 4 warps would spill.
    from_shared = 90 <= capability < 120
    if not half_weight:  # twice the registers for the tile of W
        return NormConfig(128, 128, 64 if from_shared and r > 64 else 32, "ieee", 8, 3)
    if from_shared and r > 64 and aligned:
        return NormConfig(128, 128, 64, "ieee", 4, 3, TMA=True)
    if from_shared and r > 64:
        return NormConfig(128, 256, 64, "ieee", 8, 3)
    return NormConfig(128, 128, 16 if r <= 16 else 32, "ieee", 4 if 90 <= capability < 100 else 8, 3)


def merge_config(r: int, half: bool, capability: int, half_weight: bool = True) -> NormConfig:
    """The tile of the norm up to r = 64, for any r: the bytes of the result weigh more than those of A and B. With 4 warps
    the stores spill."""
    config = norm_config(min(r, 64), half, capability)  # never TMA
    return config._replace(num_warps=8, BLOCK_K=128 if half_weight else 64) if half else config
