"""The layer's forward with a base product of 8-bit numbers: x as e4m3 codes by one kernel, then one product with all inside.

    x -> codes, and a scale for each token, or for each 128 columns of one
    y = g (sum over 128 columns of (code_x code_w) scale_x scale_w + h B^T) + bias,     h = s x A^T by cuBLAS in the dtype of x

What the numbers mean: fdora/eager/fp8.py. The product is that of gemm.py, whose tiles are of codes: cuBLAS rounds a product
with scales of rows to bfloat16, before g. Its sums have the tensor cores' precision, 14 bits on sm_90: of the base product they
lose 1.3e-3 at K = 4096, 2.9e-3 at 14336, 4.2e-3 there with scales of blocks; x as codes loses 2.6e-2. Roof on an H200: twice
the rate of half precision. Few tokens, and shapes that TMA does not take, are multiplied by the decoded W as if nobody had
asked for codes. e4m3 products want sm_89; without TMA pointers bring the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fdora._records import Dropout, Operands, Options, Saved
from fdora.quant import Codes8
from fdora.triton.codes import Coded, groups_of, packed
from fdora.triton.copy import in_dtype
from fdora.triton.dropout import drop
from fdora.triton.fp8_bwd import ALL, E4M3, quantised
from fdora.triton.gemm import Epilogue, Operand, Scales, by_tma, gemm
from fdora.triton.kernels.fp8 import fp8_gemm_kernel
from fdora.triton.linear import layers_bwd, rows_of, saves_pre_scale
from fdora.triton.linear_fwd import forward
from fdora.triton.op import Likes, maker, planned
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.plan import Array
from fdora.triton.small import Out
from fdora.triton.tiles.configs import power_of_two
from fdora.triton.tiles.fp8 import fp8_config
from fdora.triton.tiles.product import Ask


def fp8_fwd(x: Tensor, layers: Sequence[Operands], options: Sequence[Options], dropout: Dropout) -> tuple[list[Tensor], Saved]:
    """One layer, whose W is a QuantWeight of e4m3. x (..., K), half precision -> y (..., N), and what backward reads."""
    (la,), (o,) = layers, options
    facts, operands = la.W.facts, [*la.W.tensors, *la[1:]]
    if la.bias is not None and o.save == "output":  # columns that it drowns would be formed again by another product than this
        o = o._replace(save="pre_scale")
    y, h, *before = _fp8_linear(x, operands, o.s, o.save, dropout.p, facts.scale, list(facts.block))
    kept = before[0] if before else None if o.save == "nothing" else y
    return [y], Saved(h, (kept,), (len(before) > 0,))


fp8_bwd = partial(layers_bwd, fp8=True)  # dx by a product of codes


@maker("dora_linear forward, 8-bit product", "tokens rest")
def plan_fp8_linear(plan: Builder, x: Array, likes: Likes, save: str, p: float, mode: str, block: tuple[int, int]) -> None:
    """likes: codes and scales of W; A, B, m, c, bias and seed."""
    form = _form(mode, block)
    W = packed(plan, likes[:2], Coded(likes[0].shape, form))
    reads = (plan.operand, plan.matrix, plan.vector, plan.vector, plan.vector, plan.matrix)
    la: Any = Operands(W, *[read(like) for read, like in zip(reads, likes[2:], strict=True)])
    (M, K), (N, _), t, s, on = x.shape, W.shape, x.dtype, plan.scalar("s"), plan.device
    y, h, pre = plan.wanted(("y0", "h", "pre_scale0"), _forms(plan.inputs[0], la, save))
    codes = W.codes.words(W.shape, W.codes.stride, E4M3)
    right, (rows, columns) = Operand(codes, la.B, trans=True), block if mode == "block" else (1 if mode == "row" else ALL, 0)
    tma = K % 16 == 0 and by_tma(codes, right, y.flat(), pre) == (True, True)
    config = fp8_config(Ask(M, N, K, la.A.shape[0], True, pre is not None, tma, on.capability, on.num_sms), rows, columns)
    if config is None:
        forward(plan, x, [la], [s], [Out(y.flat(), h, pre)], h, Dropout(p, "lora"), True)
        return
    plan.path = "x as e4m3 codes, then one fused product of codes; low-rank term and g inside"
    plan.product(h, drop(plan, x, la.seed, p), in_dtype(plan, la.A, t).T, s)
    x8, x_scale = quantised(plan, x, columns > 0)
    scales = Scales(x_scale, W.rest[0], groups_of(W) if columns else 1, rows, columns)
    B, end = in_dtype(plan, la.B, t), Epilogue("scale", la.m, la.c, la.bias)
    if config.tma:
        gemm(plan, y.flat(), x8, h, right._replace(b=B), end, pre_scale=pre, config=config, scales=scales)
        return
    given = {"x": x8, "w": codes, "h": h, "b": B, "out": y.flat(), "pre_scale": pre, **named("stride_br stride_bn", B.T.stride)}
    given |= {"M": M, "N": N, "K": K, "R": la.A.shape[0], "BLOCK_R": min(64, power_of_two(la.A.shape[0]))}
    plan.launch(fp8_gemm_kernel, "MN", given, end, config, scales)


def _form(mode: str, block: tuple[int, int]) -> Codes8:
    return Codes8("e4m3", mode, block, 1.0)


def _forms(x: Any, la: Any, save: str) -> list[Any]:
    """y, h, and the value before g where it is saved."""
    N, M, t = la.W.shape[0], rows_of(x), x.dtype
    pre = ((M, N), t) if saves_pre_scale(t, M, la, "lora", save) else None
    return [((*x.shape[:-1], N), t), ((M, la.A.shape[0]), t), pre]


fp8_linear, _fp8_linear = planned(
    "fp8_linear",
    "(Tensor x, Tensor?[] operands, float s, str save, float p, str mode, int[] block) -> Tensor[]",
    plan_fp8_linear,
    lambda x, operands, s, save, *_: _forms(x, Operands(Coded(operands[0].shape, _form("row", (0, 0))), *operands[2:]), save),
)
