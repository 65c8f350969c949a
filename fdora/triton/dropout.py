"""The dropped copy of x, where a product needs it whole."""

from __future__ import annotations

from fdora.triton.kernels.dropout import drop_kernel
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array

BLOCK_M, BLOCK_K = 16, 256


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
    M, K = x.shape
    out = plan.temp((M, K), x.dtype) if accumulate_into is None else accumulate_into
    plan.launch(
        drop_kernel,
        (cdiv(M, BLOCK_M), cdiv(K, BLOCK_K)),
        {
            "x": x,
            "out": out,
            "seed": seed,
            "threshold": threshold(p),
            "scale": 1 / (1 - p),
            "M": M,
            "K": K,
            "ACCUMULATE": accumulate_into is not None,
            "ORIGIN": has_origin(seed),
            "BLOCK_M": BLOCK_M,
            "BLOCK_K": BLOCK_K,
        },
    )
    return out
