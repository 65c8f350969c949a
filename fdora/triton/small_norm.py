"""The layer for a handful of tokens that nobody gave its norm: W is read once for both.

    parts of h = s x A^T                        as in small.py
    c = || W + s B A ||, out = g (x W + h B) + bias       one program per few columns of the result, all of K

A program has whole rows of W. To each tile of them it adds s B A, as norm.py does, and squares: the sum over K is in one place,
so no partials are written and no second kernel adds them. What that costs beside the product is r more rows of x, and no byte
of W. Apart, the norm reads W again, which is what few tokens cost altogether.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._torch import PLAIN, needs_dispatcher
from fdora.triton.kernels.small_norm import small_norm_kernel
from fdora.triton.runtime import Array, Builder, Device, Scalar, device_of
from fdora.triton.small import Out, shrunk
from fdora.triton.tiles.configs import power_of_two, small_norm_config

MOST_RANK = 64  # of one slab: B of a program's columns stays where it is for all of K
MOST_TOKENS = 64


def norm_inside(x: Tensor, W: Any, A: Tensor, B: Tensor) -> bool:
    """Whether a layer may come to the plan of its forward without a norm: where the call reads W once for both."""
    if type(W) not in PLAIN or needs_dispatcher(x):
        return False
    return fits(device_of(x.device), x.numel() // max(1, x.shape[-1]), x.dtype, W, A, B)


def fits(on: Device, tokens: int, dtype: torch.dtype, W: Any, A: Any, B: Any) -> bool:
    """Whether :func:`small_norm_forward` takes these: all half precision, in the dtype of x. On Hopper, where it was measured:
    elsewhere W would not be copied ahead of its use."""
    if on.gpu >= 0 and not 90 <= on.capability < 100:
        return False
    half = dtype in (torch.float16, torch.bfloat16) and W.dtype == A.dtype == B.dtype == dtype
    return half and 0 < tokens <= MOST_TOKENS and 0 < A.shape[0] <= MOST_RANK and 0 not in W.shape


def small_norm_forward(
    plan: Builder,
    x: Array,
    la: Any,
    s: Scalar,
    out: Out,
    accumulate: bool = False,
) -> None:
    """:func:`fdora.triton.small.small_forward` of a layer without c, which goes to ``out``."""
    assert out.c is not None
    (M, K), (N, r), on = x.shape, la.B.shape, plan.device
    rows = MOST_TOKENS if on.capability else power_of_two(M)  # wgmma takes 64; with fewer, W would not be copied ahead
    part = shrunk(plan, x, la.A.T)
    config = small_norm_config(N, on.capability, on.num_sms)
    given = {"x": x, "w": la.W.T, "a": la.A, "part": part, "b": la.B.T, "out": out.y, "s": s, "M": M, "N": N, "K": K, "R": r}
    given |= {"PARTS": part.shape[0], "ACCUMULATE": accumulate, "BLOCK_M": rows, "BLOCK_R": power_of_two(r)}
    plan.launch(small_norm_kernel, "N", given, out, la, config, pdl=plan.pdl)
