"""The seed of a dropout mask, and where in a larger mask it begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdora._check import check_dtype, check_shapes, fail, is_int


def seed_tensor(fn: str, seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed as a tensor without axes: made by a fill or a draw on the device, neither of which waits for it."""
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        check_shapes(fn, {"seed": ""}, {"seed": seed})
        return checked(fn, seed, device)
    if isinstance(seed, bool) or not (is_int(seed) or hasattr(seed, "__index__")):  # which Dynamo does not ask a symbol
        want = "an int or an int64 tensor without axes"
        raise fail(fn, "seed", want, f"a {type(seed).__name__}", "Pass a whole number: it alone decides the mask.")
    if not 0 <= seed < 2**63:
        raise fail(fn, "seed", "in [0, 2**63)", seed, "Pass a non-negative int.")
    return torch.full((), seed, dtype=torch.int64, device=device)


def checked(fn: str, seed: Tensor, device: torch.device) -> Tensor:
    check_dtype(fn, "seed", seed, (torch.int64,))
    if seed.device != device:
        raise fail(fn, "seed", f"on {device} (the device of `x`)", seed.device, f"Move it with seed.to('{device}').")
    return seed


def drawn(count: int, device: torch.device) -> Sequence[Tensor]:
    """So many seeds by one draw, which costs a host as much as a launch. Each lies at a multiple of 16 bytes, as one of its own
    does: for another alignment kernels would be compiled again."""
    return torch.randint(2**62, (2 * count,), device=device)[::2].unbind()


def check_origin(fn: str, origin: tuple[int, int] | None, want: str = "(t0, k0)") -> tuple[int, int] | None:
    if origin is None:
        return None
    whole = isinstance(origin, tuple) and len(origin) == 2 and all([isinstance(at, (int, torch.SymInt)) for at in origin])
    if not whole or origin[0] < 0 or origin[1] < 0:
        raise fail(fn, "mask_origin", f"{want}, two ints that are not negative", origin, "None is (0, 0).")
    return origin


def placed(seed: Tensor, origin: tuple[int, int] | None) -> Tensor:
    """The seed, and behind it where the mask begins: made by fills, which no host waits for."""
    if origin is None:
        return seed
    return torch.stack([seed, *(torch.full((), at, dtype=torch.int64, device=seed.device) for at in origin)])
