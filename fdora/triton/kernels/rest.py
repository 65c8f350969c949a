"""What a layer adds to a product that is there; see fdora/triton/product.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.gemm import tile_of_product
from fdora.triton.kernels.tile import products
from fdora.triton.runtime.cost import launched


@triton.jit(launch_metadata=launched)
def rest_kernel(
    base, h, b, out, pre_scale, m, c, bias, M, N, R, stride_hm, stride_hr, stride_br, stride_bn,
    SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PRE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):
    """(M, N) base, (M, R) h, (R, N) b -> g (base + h b) + bias. ``out`` or ``pre_scale`` may be ``base``."""
    row, col = tile_of_product(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    t, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    at = t[:, None].to(tl.int64) * N + n[None, :]
    mask = (t < M)[:, None] & (n < N)[None, :]
    there = tl.load(base + at, mask=mask, other=0.0)  # on its way while the product runs
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = products(acc, h, b, row, col, M, N, R, stride_hm, stride_hr, stride_br, stride_bn, BLOCK_M, BLOCK_N, BLOCK_R)
    acc += there.to(tl.float32)
    if STORE_PRE_SCALE:
        tl.store(pre_scale + at, acc.to(pre_scale.dtype.element_ty), mask=mask)
    if SCALE:
        acc = acc * g_tile(m, c, n, N)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
