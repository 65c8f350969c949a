"""g = m / max(c, EPS) of a tile's columns, and dz = g dy."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora._records import eps
from fdora.triton.kernels.tile import vector

EPS = tl.constexpr(eps())


@triton.jit
def floored(c):
    """Norms that g divides by, in float32. A NaN stays one."""
    c = c.to(tl.float32)
    return tl.where(c < EPS, EPS, c)


@triton.jit
def g_tile(m, c, n, N):
    """g of the columns n, in float32."""
    return g_of(m, vector(c, n, N, 1.0), n, N)


@triton.jit
def g_of(m, cn, n, N):
    """The same, of the norms cn of these columns."""
    return tl.div_rn(vector(m, n, N).to(tl.float32), floored(cn))


@triton.jit
def times_g(d, g, dtype: tl.constexpr):
    """g d of a float32 d, rounded. float16: as fdora/eager/_matmul.py has it, a finite d stays finite where g does not fit."""
    z = d * g
    if dtype == tl.float16:
        near = tl.minimum(tl.maximum(z, -65504.0), 65504.0)
        z = tl.where((tl.abs(g) > 65504.0) & (tl.abs(d) <= 65504.0), near, z)
    return z.to(dtype)
