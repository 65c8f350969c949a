"""The layer's forward with a base product of 8-bit numbers: x as e4m3 codes by one kernel, then one product with all inside.

    x -> codes, and a scale for each token, or for each 128 columns of one
    y = g (sum over 128 columns of (code_x code_w) scale_x scale_w + h B^T) + bias,     h = s x A^T by cuBLAS in the dtype of x

What the numbers mean: fdora/eager/fp8.py. The product is the library's own, with scales of any kind applied in float32 and the
low-rank term, g and bias behind them: cuBLAS rounds a product with scales of rows to bfloat16, before g. e4m3 products want
sm_89; roof on an H200: twice the rate of half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import Dropout, Operands, Options, Saved
from fdora.quant import Codes8
from fdora.triton.codes import Coded
from fdora.triton.copy import in_dtype
from fdora.triton.dropout import drop
from fdora.triton.kernels.fp8 import fp8_blocks_kernel, fp8_gemm_kernel, fp8_rows_kernel
from fdora.triton.linear import rows_of, saves_pre_scale
from fdora.triton.op import Likes, maker, planned
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array
from fdora.triton.tiles.configs import fp8_config, power_of_two

BLOCK, TOKENS = 128, 16
E4M3 = torch.float8_e4m3fn


def fp8_fwd(x: Tensor, layers: Sequence[Operands], options: Sequence[Options], dropout: Dropout) -> tuple[list[Tensor], Saved]:
    """One layer, whose W is a QuantWeight of e4m3. x (..., K), half precision -> y (..., N), and what backward reads."""
    (la,), (o,) = layers, options
    facts, operands = la.W.facts, [*la.W.tensors, *la[1:]]
    if la.bias is not None and o.save == "output":  # columns that it drowns would be formed again by another product than this
        o = o._replace(save="pre_scale")
    y, h, *before = _fp8_linear(x, operands, o.s, o.save, dropout.p, facts.scale, list(facts.block))
    kept = before[0] if before else None if o.save == "nothing" else y
    return [y], Saved(h, (kept,), (len(before) > 0,))


@maker("dora_linear forward, 8-bit product", "tokens matrix flat rest")
def plan_fp8_linear(
    plan: Builder, x: Array, codes: Array, scales: Array, likes: Likes, save: str, p: float, mode: str, block: tuple[int, int]
) -> None:
    """likes: A, B, m, c, bias and seed."""
    reads = (plan.operand, plan.matrix, plan.vector, plan.vector, plan.vector, plan.matrix)
    la = _layer(codes.shape, [read(like) for read, like in zip(reads, likes, strict=True)])
    (M, K), N, r, t, A, s = x.shape, codes.shape[0], la.A.shape[0], x.dtype, la.A, plan.scalar("s")
    y, h, pre = plan.wanted(("y0", "h", "pre_scale0"), _forms(plan.inputs[0], la, save))
    plan.path = "x as e4m3 codes, then one fused product of codes; low-rank term and g inside"
    plan.product(h, drop(plan, x, la.seed, p), in_dtype(plan, A, t).T, s)
    x8, x_scale = _quantised(plan, x, mode == "block")
    B = in_dtype(plan, la.B, t)
    config = fp8_config(M, N, K, plan.device.capability)
    rows, columns = block if mode == "block" else (1, 1)
    given = {"x": x8, "x_scale": x_scale, "w": codes, "w_scale": scales, "h": h, "b": B, "out": y.flat(), "pre_scale": pre}
    given |= {"M": M, "N": N, "K": K, "R": r, "groups": cdiv(K, columns), **named("stride_br stride_bn", B.T.stride)}
    given |= {"MODE": mode, "BN": rows, "BK": columns, "BLOCK_R": max(16, min(64, power_of_two(r))), "GROUP_M": 8}
    plan.launch(fp8_gemm_kernel, "MN", given, la, config)


def _quantised(plan: Builder, x: Array, blocks: bool) -> tuple[Array, Array]:
    """(M, K) -> e4m3 codes without gaps, and scales (1, M) or (blocks of columns, M)."""
    M, K = x.shape
    out = plan.temp((M, K), E4M3)
    scale = plan.temp((cdiv(K, BLOCK) if blocks else 1, M))
    args = {"x": x, "out": out.words((M, K), (K, 1), torch.uint8), "scale": scale, "M": M, "K": K}
    if blocks:
        plan.launch(fp8_blocks_kernel, (cdiv(M, TOKENS), cdiv(K, BLOCK)), {**args, "BLOCK_M": TOKENS, "BLOCK": BLOCK})
    else:
        plan.launch(fp8_rows_kernel, (M,), {**args, "BLOCK_K": min(4096, max(128, power_of_two(K)))})
    return out, scale


def _layer(shape: Any, rest: Sequence[Any]) -> Any:
    """The operands, with what is known of W."""
    return Operands(Coded(shape, Codes8("e4m3", "tensor", (0, 0), 1.0)), *rest)


def _forms(x: Any, la: Any, save: str) -> list[Any]:
    """y, h, and the value before g where it is saved."""
    N, M, t = la.W.shape[0], rows_of(x), x.dtype
    pre = ((M, N), t) if saves_pre_scale(t, M, la, "lora", save) else None
    return [((*x.shape[:-1], N), t), ((M, la.A.shape[0]), t), pre]


fp8_linear, _fp8_linear = planned(
    "fp8_linear",
    "(Tensor x, Tensor?[] operands, float s, str save, float p, str mode, int[] block) -> Tensor[]",
    plan_fp8_linear,
    lambda x, operands, s, save, *_: _forms(x, _layer(operands[0].shape, operands[2:]), save),
)
