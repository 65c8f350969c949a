"""Fold an adapter into its weight, ``W' = g (W + s B A)``, and take it out again, ``W = W' / g - s B A``.

A row of W' is m_n times a unit vector: c cannot be read off it, so the way back needs the norm of before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fdora._records import eps
from fdora.eager._matmul import acc_dtype
from fdora.eager.norm import blocks, default_bytes, scale


def merge_fwd(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float) -> Tensor:
    """(N, K) -> (N, K) in the dtype of W, in row blocks: no dense B A."""
    acc, g = acc_dtype(W.dtype), scale(m, c)[:, None]

    def merged(i: int, j: int) -> Tensor:
        return g[i:j] * torch.addmm(W[i:j].to(acc), s * B[i:j].to(acc), A.to(acc))

    return _by_rows(W, merged)


def unmerge_fwd(W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float) -> Tensor:
    """(N, K) merged -> (N, K). A row with c = 0 was -s B A itself; one with g = 0 and c > 0 comes back as NaN."""
    acc, g = acc_dtype(W.dtype), scale(m, c)[:, None]
    zero = (c <= eps())[:, None]

    def unmerged(i: int, j: int) -> Tensor:
        return torch.addmm(torch.where(zero[i:j], 0, W[i:j].to(acc) / g[i:j]), -s * B[i:j].to(acc), A.to(acc))

    return _by_rows(W, unmerged)


def _by_rows(W: Tensor, made: Callable[[int, int], Tensor]) -> Tensor:
    rows = max(1, default_bytes(W.device) // (W.element_size() * max(1, W.shape[1])))
    return torch.cat([made(i, j).to(W.dtype) for i, j in blocks(W.shape[0], rows)])
