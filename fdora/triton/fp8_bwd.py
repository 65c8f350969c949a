"""x and dz as e4m3 codes, and dx of a layer by a product of codes.

    dx = dz W + D'(dh A)      dz W ~ q(dz a) (codes of W),  W = a (codes);  a of a row goes into dz before it is rounded

What q is: fdora/eager/fp8.py. Tensor cores take codes along the sum alone, which here runs over the rows of W: its codes are
turned in a pass of their own for each call, 2 bytes a weight moved and 1 of temporary memory, where a second copy of the codes
would hold that for good. dh A is inside of the product, or, under dropout, masked and added behind it. Where TMA does not take
the shapes, and for few tokens, W is decoded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora.triton.codes import has_ptx
from fdora.triton.copy import in_dtype, stacked
from fdora.triton.dropout import drop
from fdora.triton.gemm import Operand, Scales, gemm
from fdora.triton.kernels.fp8 import fp8_blocks_kernel, fp8_rows_kernel, turn_kernel
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array
from fdora.triton.tiles.configs import GemmConfig, power_of_two
from fdora.triton.tiles.fp8 import fp8_config
from fdora.triton.tiles.product import Ask

BLOCK, TOKENS, ALL, TURNED = 128, 16, 1 << 30, 128
E4M3, FP32 = torch.float8_e4m3fn, torch.float32
CODES = "dz as e4m3 codes, one fused product of codes for dx"


class Other(NamedTuple):
    """What becomes codes beside x: see kernels/fp8.py."""

    OTHER: str = ""
    other: Array | None = None
    factor: float = 1.0


ONLY_X = Other()


def quantised(plan: Builder, x: Array, blocks: bool, by: Array | None = None, other: Other = ONLY_X) -> tuple[Array, Array]:
    """(M, K), its columns times ``by`` (K,) -> e4m3 codes without gaps, and scales (1, M) or (blocks of columns, M)."""
    M, K = x.shape
    out, scale = plan.temp((M, K), E4M3), plan.temp((cdiv(K, BLOCK) if blocks else 1, M))
    args = {"x": x, "out": out.words((M, K), (K, 1), torch.uint8), "scale": scale, "M": M, "K": K}
    args["PTX"] = has_ptx(plan.device.capability)
    if blocks:
        assert by is None and other is ONLY_X
        plan.launch(fp8_blocks_kernel, (cdiv(M, TOKENS), cdiv(K, BLOCK)), {**args, "BLOCK_M": TOKENS, "BLOCK": BLOCK})
    else:
        block_k = min(16384, max(128, power_of_two(K)))
        plan.launch(fp8_rows_kernel, (M,), {**args, "by": by, "BLOCK_K": block_k}, other, num_warps=max(4, block_k // 1024))
    return out, scale


def codes_config(plan: Builder, of: Any) -> GemmConfig | None:
    """The tile of such a product; None where W is decoded. ``of``: as of linear_bwd.py."""
    la, (M, K), form, on = of.la, of.dx.shape, of.la.W.form, plan.device
    N, (rows, columns) = la.W.shape[0], form.block if form.scale == "block" else (0, ALL)
    config = fp8_config(Ask(M, K, N, la.A.shape[0], True, False, True, on.capability, on.num_sms), columns, rows)
    return None if config is None or not config.tma or N % 16 or K % 8 or rows % BLOCK else config


def turned(plan: Builder, codes: Array) -> Array:
    """(N, K) bytes -> (K, N) e4m3."""
    N, K = codes.shape
    out = plan.temp((K, N), E4M3)
    given = {"codes": codes, "out": out.words((K, N), (N, 1), torch.uint8), **named("stride_n stride_k", codes.stride)}
    plan.launch(turn_kernel, (cdiv(N, TURNED), cdiv(K, TURNED)), given | {"N": N, "K": K, "BLOCK": TURNED})
    return out


def dx_of_codes(plan: Builder, of: Any, dz: Array, dh: Array, config: GemmConfig) -> str:
    dx, la, W, t = of.dx, of.la, of.la.W, dz.dtype
    (N, K), form, scale, A = W.shape, W.form, W.rest[0], in_dtype(plan, of.la.A, dz.dtype)
    codes, blocks = turned(plan, W.codes), form.scale == "block"
    dz8, of_token = quantised(plan, dz, blocks, scale if form.scale == "row" else None)
    scales = Scales(of_token, scale if form.scale == "tensor" else None, 1, ALL)
    if blocks:
        rows, columns = form.block
        each = scale.words((cdiv(N, rows), cdiv(K, columns)), (cdiv(K, columns), 1), FP32)
        scales = Scales(of_token, stacked(plan, [each.T], FP32, 4), cdiv(N, rows), columns, rows)
    right = Operand(codes, stacked(plan, [A.T], t), trans=True)
    gemm(plan, dx, dz8, dh, right, config=config, scales=scales, alone=la.seed is not None)
    if la.seed is not None:
        part = plan.temp(dx.shape, t)
        plan.product(part, dh, A)
        drop(plan, part, la.seed, of.dropout.p, accumulate_into=dx)
    return CODES
