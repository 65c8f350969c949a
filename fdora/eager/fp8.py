"""The layer's forward with a base product of 8-bit numbers, in plain torch: what the kernels of fdora/triton/fp8.py compute
(of few tokens, and of shapes that they do not take, they round nothing).

    x ~ q(x) = code * a      code = e4m3(x (1 / a)), a = max |x| / 448 of a token, or of 128 columns of a token, at least 2^-126
    base = q(x) W^T          W[n, k] = code[n, k] * scale, as its format has it, rounded nowhere else
    y = g (base + s (x A^T) B^T) + bias

Only x loses digits: 3 bits of fraction are left of each number, 2.6 % of it in the mean square, whatever its size; fewer below
2^-15 of the largest, and nothing below 2^-19. The low-rank term reads x itself. q is taken for the identity in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdora._records import Dropout, Operands, Options, Saved
from fdora.eager.linear import as_matrix, linear_fwd, shaped
from fdora.eager.norm import blocks, default_bytes
from fdora.quant import Codes8, QuantWeight

BLOCK = 128  # columns of x under one scale where W has scales of blocks
LARGEST = 448.0


def fp8_fwd(x: Tensor, layers: Sequence[Operands], options: Sequence[Options], drop: Dropout) -> tuple[list[Tensor], Saved]:
    """One layer, whose W is a QuantWeight of e4m3. x (..., K), half precision -> y (..., N), and what backward reads."""
    (la,), (o,), flat = layers, options, as_matrix(x)
    # The value before g is what q(x) gave: backward, which has x and the decoded W, could not form it again.
    o = o if o.save == "nothing" else Options(o.s, "pre_scale")
    y, h, v = linear_fwd(flat, la, o, drop, None, base=base_of(flat, la.W))
    return [shaped(y, x)], Saved(h, (v,), (v is not None,))


def quantised(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(M, K) -> its e4m3 codes, and the float32 scale (M, ceil(K / columns)) of each run of columns."""
    M, K = x.shape
    wide = torch.nn.functional.pad(x.float(), (0, -K % columns)).unflatten(1, (-1, columns)) if K else x.float()[:, None]
    largest = wide.abs().amax(2) if K else wide.new_zeros((M, 1))
    # By a tensor: by a number a GPU multiplies with its reciprocal, and the kernel divides.
    scale = (largest / torch.full_like(largest, LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)  # 1 / scale is finite
    scale = scale.where(largest > 0, 1.0)
    codes = (wide * (1 / scale)[:, :, None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :K], scale


def base_of(x: Tensor, W: QuantWeight) -> Tensor:
    """(M, K) -> q(x) W^T (M, N) float32."""
    facts, (N, K) = W.facts, W.shape
    assert isinstance(facts, Codes8)
    columns = BLOCK if facts.scale == "block" else max(1, K)
    codes, scale = quantised(x, columns)
    q = codes.float() * scale.repeat_interleave(columns, 1)[:, :K]
    rows = max(1, default_bytes(x.device) // (4 * max(1, K)))
    return torch.cat([q @ W.dequantize(torch.float32, rows=slice(i, j)).T for i, j in blocks(N, rows)], 1)
