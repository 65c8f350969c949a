"""A base product of 8-bit numbers in plain torch: what the kernels of fdora/triton/fp8.py compute (of few tokens, and of shapes
that they do not take, they round nothing).

    x ~ q(x) = code * a      code = e4m3(x (1 / a)), a = max |x| / 448 of a token, or of 128 columns of a token, at least 2^-126
    base = q(x) W^T          W[n, k] = code[n, k] * scale, as its format has it, rounded nowhere else
    y = g (base + s (x A^T) B^T) + bias
    dx = q(dz a) (W / a) + s D'(dz B A)     backward, where it is asked for; a: of each row of W, 1 where W has scales of blocks

Where W has scales of 32 columns (MXFP8), x and dz have such, powers of two, and dx is q(dz) q(W^T)^T: a product wants them
along its sum. With another power of two a code of W is the same number, unless it is below 2^-13 of the largest of 32 rows.
Where W is NVFP4, so is x, but with a float32 scale for each token, which others' numbers do not change.

Only x loses digits: 3 bits of fraction are left of each number, 2.6 % of it in the mean square, whatever its size; fewer below
2^-15 of the largest, and nothing below 2^-19. The low-rank term reads x itself. Autograd takes q for the
identity. dz is rounded as x is, by token or by 128 columns, and the other gradients read dz itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora.eager.norm import blocks, default_bytes
from fdora.quant import Codes8, Lut4, QuantWeight
from fdora.quant.lut4 import pairs
from fdora.quant.quantize import E2M1_MAX, grouped, nvfp4

BLOCK = 128  # columns of x under one scale where W has scales of blocks
LARGEST = 448.0
MX, NV = 32, 16  # columns under one scale where W is MXFP8 and NVFP4


def quantised(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(M, K) -> its e4m3 codes, and the float32 scale (M, ceil(K / columns)) of each run of columns."""
    M, K = x.shape
    wide = grouped(x.float(), columns) if K else x.float()[:, None]
    largest = wide.abs().amax(2) if K else wide.new_zeros((M, 1))
    # By a tensor: by a number a GPU multiplies with its reciprocal, and the kernel divides.
    each = (largest / torch.full_like(largest, LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)  # 1 / scale is finite
    each = each.where(largest > 0, 1.0)
    codes = (wide * (1 / each)[:, :, None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :K], each


def of_powers(x: Tensor) -> Tensor:
    """(M, K) -> q(x) float32 where each 32 columns have a power of two for a scale: the least that leaves nothing above 448."""
    wide = grouped(x.float(), MX)
    largest = wide.abs().amax(2, keepdim=True)
    fraction, power = torch.frexp(largest / torch.full_like(largest, LARGEST))
    scale = torch.ldexp(torch.ones_like(largest), (power - (fraction <= 0.5).int()).clamp_min(-126))
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : x.shape[1]]


def of_nvfp4(x: Tensor) -> Tensor:
    """(M, K) -> q(x) float32: the codes of such weights, with a scale for each token in the place of the tensor's."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    whole = (largest / torch.full_like(largest, LARGEST * E2M1_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    codes, scales = nvfp4(wide, whole)
    values = pairs("e2m1", False, x.device).index_select(0, codes.flatten().int()).view(x.shape)
    return values * scales.float().repeat_interleave(NV, 1)[:, : x.shape[1]] * whole


def rounded(x: Tensor, facts: Codes8 | Lut4) -> Tensor:
    """(M, K) -> q(x) float32."""
    if isinstance(facts, Lut4):
        return of_nvfp4(x) if x.shape[1] else x.float()
    if facts.block[1] == MX and x.shape[1]:
        return of_powers(x)
    columns = BLOCK if facts.scale == "block" else max(1, x.shape[1])
    codes, each = quantised(x, columns)
    return codes.float() * each.repeat_interleave(columns, 1)[:, : x.shape[1]]


def base_of(x: Tensor, W: QuantWeight) -> Tensor:
    """(M, K) -> q(x) W^T (M, N) float32."""
    q = rounded(x, facts_of(W))
    return torch.cat([q @ W.dequantize(torch.float32, rows=rows).T for rows in _slabs(W, x)], 1)


def through_base(dz: Tensor, W: QuantWeight) -> Tensor:
    """(M, N) -> q(dz a) (W / a) (M, K) float32."""
    facts, dx = facts_of(W), dz.new_zeros((len(dz), W.shape[1]), dtype=torch.float32)
    a = W.tensors[1] if facts.scale == "row" else None
    q = rounded(dz if a is None else dz.float() * a, facts)
    mx = facts.block[1] == MX
    for rows in _slabs(W, dz, MX if mx else 1):
        dense = W.dequantize(torch.float32, rows=rows) if a is None else W.tensors[0][rows].float()  # type: ignore[index]
        dx += q[:, rows] @ (of_powers(dense.T).T if mx else dense)
    return dx


def facts_of(W: QuantWeight) -> Any:
    assert isinstance(W.facts, (Codes8, Lut4))
    return W.facts


def _slabs(W: QuantWeight, of: Tensor, whole: int = 1) -> list[slice]:
    """Rows that are dense at once; all but the last are so many, or several times that."""
    N, K = W.shape
    runs = blocks(-(-N // whole), max(1, default_bytes(of.device) // (4 * whole * max(1, K))))
    return [slice(i * whole, min(N, j * whole)) for i, j in runs]
