"""The dropped copy of x, where a product needs it whole, and where none is made."""

from __future__ import annotations

import torch

from fdora.triton.kernels.dropout import drop_kernel
from fdora.triton.runtime import Array, Builder, named

TILE = {"BLOCK_M": 16, "BLOCK_K": 256}
CACHED = 1 << 24  # elements of a copy that is read out of the cache


def threshold(p: float) -> int:
    """An element survives where its 32-bit hash is not below it."""
    return int(p * 2**32)


def has_origin(seed: Array | None) -> bool:
    """Whether the position of the first element stands behind the seed."""
    return seed is not None and seed.numel > 1


def wants_copy(r: int) -> bool:
    """Whether sums of this rank read a copy of the dropped x: in more than two strips of ranks, masks are drawn too often."""
    return r > 128


def drawn_inside(x: Array, seed: Array | None, r: int) -> bool:
    """Whether sums over D(x) draw the mask themselves, in half precision. Of Llama-3.1-8B's layers at r = 64 on an H200 they
    took 1 % of a step less than a copy at 8000 tokens, the same at 3000 and 3 % more at 1000, where the copy stays in the cache
    (h200/steps_dropout_bf16, bench/NOTES.md). The mask of a part of a larger x counts from elsewhere: a copy is made."""
    large = x.dtype != torch.float32 and int(x.shape[0]) * x.shape[1] > CACHED
    return large and seed is not None and not has_origin(seed) and x.stride[1] == 1 and not wants_copy(r)


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
