"""Dropout as a pure function of a seed and an element's position: same mask on recomputation, on every device.

keep[t, k] = hash(seed, t, k) >= p * 2**32, with a two-constant xor-multiply hash. No generator state is read or moved,
so it works under vmap, torch.compile and checkpointing, and a kernel can draw the mask again instead of reading it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdora._records import acc_dtype

_MASK = 0xFFFFFFFF


def _mix(v: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) in which every output bit depends on every input bit.

    Both multipliers are below 2**31, so a product stays below 2**63: no signed overflow, on any device.
    """
    v = v ^ (v >> 16)
    v = (v * 0x21F0AAAD) & _MASK
    v = v ^ (v >> 15)
    v = (v * 0x735A2D97) & _MASK
    return v ^ (v >> 15)


def keep_mask(M: int, K: int, seed: Tensor, p: float | Tensor, rows: Tensor | None = None) -> Tensor:
    """(M, K) bool, True where an element survives.

    ``seed``: int64, no axes; or three, the seed and the position (t, k) of the first element in a larger matrix. With ``rows``,
    (M,) int64, what each row counts as, it may have one for each row, (M,); p too, (M, 1) float64.
    """
    t = torch.arange(M, device=seed.device) if rows is None else rows
    k = torch.arange(K, device=seed.device)
    if seed.dim() and rows is None:
        seed, t0, k0 = seed.unbind()
        t, k = t + t0, k + k0
    key = _mix((seed & _MASK) ^ _mix((seed >> 32) & _MASK))
    row = _mix(((t + 1) & _MASK) ^ key) ^ _mix(t >> 32)
    # A row is mixed already, and the highest bits decide: one xor between two products is enough (tests/eager/test_dropout.py),
    # and takes half the instructions of _mix, of which kernels that draw a mask have more than loads.
    v = ((row[:, None] ^ ((k * 0x1E3779B1) & _MASK)) * 0x21F0AAAD) & _MASK
    drawn = ((v ^ (v >> 16)) * 0x735A2D97) & _MASK
    return drawn >= ((p * 2**32).long() if isinstance(p, Tensor) else int(p * 2**32))


def drop(x: Tensor, seed: Tensor | None, p: float | Tensor, rows: Tensor | None = None) -> Tensor:
    """x with its elements zeroed with probability p and the rest scaled by 1 / (1 - p); x itself when seed is None."""
    if seed is None:
        return x
    kept = keep_mask(x.shape[0], x.shape[1], seed, p, rows)
    if isinstance(p, Tensor):  # as a number, which is not rounded to the dtype of x
        wide = x.to(acc_dtype(x.dtype))
        return torch.where(kept, wide * (1 / (1 - p)).to(wide), 0).to(x.dtype)
    return torch.where(kept, x * (1 / (1 - p)), 0)
