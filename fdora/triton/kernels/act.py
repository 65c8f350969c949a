"""A gated activation, ``a = f(gate) up``; formulas in fdora/eager/act.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import put
from fdora.triton.runtime.cost import kernel

CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(0.7071067811865476)
TWICE_ROOT_2_OVER_PI = tl.constexpr(1.5957691216057308)
DENSITY_0 = tl.constexpr(0.3989422804014327)  # of the normal law


@triton.jit
def share_of(z, ACT: tl.constexpr):
    """f(z) / z."""
    if ACT == "silu":
        return tl.sigmoid(z)
    elif ACT == "gelu":
        return 0.5 + 0.5 * tl.erf(z * ROOT_HALF)
    else:
        return tl.sigmoid((z + z * z * z * CUBIC) * TWICE_ROOT_2_OVER_PI)


@triton.jit
def slope_of(z, share, ACT: tl.constexpr):
    """f'(z)."""
    f = z * share
    if ACT == "silu":
        return share + f * (1 - share)
    elif ACT == "gelu":
        return share + z * tl.exp(-0.5 * z * z) * DENSITY_0
    else:
        return share + f * (1 - share) * (1 + z * z * CUBIC * 3) * TWICE_ROOT_2_OVER_PI


@triton.jit
def gradient_of(d, z, u, OF_UP: tl.constexpr, ACT: tl.constexpr):
    """d up, or d gate, in float32."""
    share = share_of(z, ACT)
    return d * (z * share) if OF_UP else d * u * slope_of(z, share, ACT)


@kernel("gate up a")
def act_fwd_kernel(gate, up, a, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    put(z * share_of(z, ACT) * u, a, at, count)


@kernel("da gate up dgate dup")
def act_bwd_kernel(da, gate, up, dgate, dup, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    d = tl.load(da + at, mask=at < count).to(tl.float32)
    put(gradient_of(d, z, u, False, ACT), dgate, at, count)
    put(gradient_of(d, z, u, True, ACT), dup, at, count)
