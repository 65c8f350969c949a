"""g and bias on a float32 product; see fdora/triton/linear.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def epilogue_kernel(
    v, residual, out, m, c, bias, M, N,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (t < M)[:, None] & (n < N)[None, :]
    at = t[:, None].to(tl.int64) * N + n[None, :]
    y = tl.load(v + at, mask=mask)
    if EPILOGUE == "scale":
        y = g_tile(m, c, n, N)[None, :] * y
        if residual is not None:
            y += tl.load(residual + at, mask=mask)
    if EPILOGUE == "residual":
        y = y + (g_tile(m, c, n, N) - 1)[None, :] * tl.load(residual + at, mask=mask)
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)
