"""The product of a layer with its low-rank term, in one of two ways; which one is a function of the shape (configs.py).

    forward   y = g (x W^T + h B^T) + bias
    backward  dx = dz W + dh A

Fused: everything in one product (gemm.py); nothing of size (M, N) but the result is written. Beside cuBLAS: its product of x
alone, tuned for any number of tiles, and one pass over the result for the rest. In backward the pass comes first: cuBLAS
adds its product to dh A. Two more passes over the result, which few tokens leave in the cache; forward rounds x W^T once more.
"""

from __future__ import annotations

import torch

from fdora.triton.configs import GemmConfig
from fdora.triton.copy import operand
from fdora.triton.gemm import Epilogue, Operand, fitting, gemm
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.plan import Array


def scaled_product(
    plan: Builder, y: Array, x: Array, h: Array, W: Array, B: Array, epilogue: Epilogue, pre: Array | None,
) -> None:  # fmt: skip
    gemm(plan, y, x, h, Operand(W, B, trans=True), epilogue, pre_scale=pre)


def beside_cublas(
    plan: Builder, y: Array, x: Array, h: Array, W: Array, B: Array, epilogue: Epilogue, pre: Array | None = None,
    config: GemmConfig | None = None, wide: bool = False,
) -> None:  # fmt: skip
    base = plan.temp(y.shape, torch.float32) if wide else y if pre is None else pre
    plan.product(base, x, operand(plan, W).T)
    h, B = fitting(plan, h), fitting(plan, B)
    gemm(
        plan, y, h, None, Operand(B, B, trans=True), epilogue._replace(kind="base", residual=base), pre_scale=pre, config=config
    )


def summed_product(plan: Builder, dx: Array, dz: Array, dh: Array, W: Array, A: Array, accumulate: bool) -> None:
    plan.product(dx, dh, operand(plan, A), accumulate=accumulate)
    plan.product(dx, dz, operand(plan, W), accumulate=True)


def summed_after(plan: Builder, dx: Array, dz: Array, dh: Array, W: Array, A: Array, config: GemmConfig | None = None) -> None:
    plan.product(dx, dz, operand(plan, W))
    dh, A = fitting(plan, dh), fitting(plan, A)
    gemm(plan, dx, dh, None, Operand(A, A, trans=False), Epilogue("accumulate", residual=dx), config=config)
