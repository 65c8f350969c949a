"""What adapters do to a weight, never as a dense matrix: ``W' - W = diag(d) W + P Q``.

One DoRA adapter: d = g - 1, P = s diag(g) B, Q = A (LoRA: d = 0, P = s B). A weighted sum of changes is one again, with
d = sum w_i d_i, P = [w_1 P_1, w_2 P_2, ...] and Q stacked below each other: exact, of rank sum r_i beside the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fdora.convert.adapter import Adapter, adapter_scale, to_rows

BLOCK = 1 << 21  # elements of W that are looked at together


class Change(NamedTuple):
    d: Tensor  # (N,)
    P: Tensor  # (N, R)
    Q: Tensor  # (R, K)


def change_of(W: Tensor, p: Adapter) -> Change:
    g = adapter_scale(W, p)
    _, A, B = to_rows(W, p)
    return Change(g - 1, p.s * g[:, None] * B, A)


def weighted_sum(changes: list[Change], weights: list[float]) -> Change:
    pairs = list(zip(changes, weights, strict=True))
    return Change(
        torch.stack([w * t.d for t, w in pairs]).sum(0),
        torch.cat([w * t.P for t, w in pairs], 1),
        torch.cat([t.Q for t in changes]),
    )


def relative_error(V: Tensor, got: Change, want: Change) -> float:
    """How much of a change another one misses: ``||got - want|| / ||want||``, 0 where there is nothing to miss."""
    size = _frobenius(V, want)
    return _frobenius(V, weighted_sum([got, want], [1.0, -1.0])) / size if size else 0.0


def times(V: Tensor, t: Change, X: Tensor) -> Tensor:
    """(diag(d) V + P Q) X."""
    VX = torch.cat([V[i:j].to(X.dtype) @ X for i, j in blocks(V)])
    return t.d[:, None] * VX + t.P @ (t.Q @ X)


def transposed_times(V: Tensor, t: Change, Y: Tensor) -> Tensor:
    """(diag(d) V + P Q)^T Y."""
    dY = t.d[:, None] * Y
    parts = [V[i:j].to(Y.dtype).T @ dY[i:j] for i, j in blocks(V)]
    return sum(parts[1:], parts[0]) + t.Q.T @ (t.P.T @ Y)


def blocks(V: Tensor) -> Iterator[tuple[int, int]]:
    N, K = V.shape
    step = max(1, BLOCK // max(1, K))
    return ((i, min(i + step, N)) for i in range(0, max(1, N), step))


def _frobenius(V: Tensor, t: Change) -> float:
    dense = (torch.addmm(t.d[i:j, None] * V[i:j].to(t.d.dtype), t.P[i:j], t.Q) for i, j in blocks(V))
    return math.sqrt(sum(float(torch.linalg.vector_norm(rows)) ** 2 for rows in dense))
