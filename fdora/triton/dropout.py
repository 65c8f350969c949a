"""The dropped copy of x, where a product needs it whole."""

from __future__ import annotations

from fdora.triton.kernels.dropout import drop_kernel
from fdora.triton.runtime import Array, Builder, named

TILE = {"BLOCK_M": 16, "BLOCK_K": 256}


def threshold(p: float) -> int:
    """An element survives where its 32-bit hash is not below it."""
    return int(p * 2**32)


def has_origin(seed: Array | None) -> bool:
    """Whether the position of the first element stands behind the seed."""
    return seed is not None and seed.numel > 1


def drop(plan: Builder, x: Array, seed: Array | None, p: float, accumulate_into: Array | None = None) -> Array:
    """x with its elements zeroed with probability p and the rest scaled by 1 / (1 - p), or that added to ``accumulate_into``.

    x itself when seed is None.
    """
    if seed is None:
        assert accumulate_into is None
        return x
    accumulate = accumulate_into is not None
    out = accumulate_into or plan.temp(x.shape, x.dtype)
    given = {"x": x, "out": out, "seed": seed, "threshold": threshold(p), "scale": 1 / (1 - p), "ACCUMULATE": accumulate}
    plan.launch(drop_kernel, "M K", given | {"ORIGIN": has_origin(seed), **named("M K", x.shape)}, TILE)
    return out
