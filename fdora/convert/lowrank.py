"""Weighted sums of adapters, and DoRA as plain LoRA.

combine. The sum of changes is ``diag(d) W + P Q``, so ``W' = diag(1 + d) W + P Q`` is itself a DoRA adapter: direction
W + B A with g = 1 + d, B = diag(1 / g) P, A = Q, s = 1, and m = g ||W + B A|| to make m / c = g. At rank sum r_i that is exact,
without an SVD. Below it P Q is cut to its best rank-r part, and g takes up what the rest E has along W: g_n += <E_n, W_n> /
||W_n||^2, the least squares. Against alternating least squares over g and P Q
together this left at most 0.5 % more error (256 x 192, ranks 4 to 8), 4 % where r is nearly K (24 x 20, rank 8).

to_lora. ``diag(d) W + P Q`` is of full rank, so this one loses; its best rank-r part comes from subspace iteration (Halko,
Martinsson and Tropp, 2011, arXiv:0909.4061, algorithm 4.4), which needs products with W only. Eight rounds left at most 0.05 %
more error than the SVD of the dense change (1024 x 768, ranks 16 to 128, g off by 1 and 10 %).

What adapters do to a weight, never as a dense matrix: ``W' - W = diag(d) W + P Q``.

One DoRA adapter: d = g - 1, P = s diag(g) B, Q = A (LoRA: d = 0, P = s B). A weighted sum of changes is one again, with
d = sum w_i d_i, P = [w_1 P_1, w_2 P_2, ...] and Q stacked below each other: exact, of rank sum r_i beside the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdora._check import FdoraError, check_rank, fail
from fdora.convert.adapter import Adapter, adapter_scale, from_rows, to_rows
from fdora.functional import dora_base_sqnorm, dora_norm

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


ITERATIONS, OVERSAMPLING = 8, 16
SMALL = 1e-6  # of ||(P Q)_n|| / ||W_n||: a g below would lose W in W + B A


@torch.no_grad()
def combine(
    W: Tensor, adapters: Sequence[Adapter], weights: Sequence[float], *, r: int | None = None, max_error: float | None = None
) -> tuple[Adapter, float]:
    """One DoRA adapter that does what weighted adapters do: ``W' = W + sum_i w_i (g_i (W + s_i B_i A_i) - W)``.

    Exact at ``r = sum r_i``, which is what r=None gives; then ``combine(W, [p], [1.0])`` is p. Weights may be negative and need
    not add up to 1. DoRA and LoRA mix. For a plain LoRA of the sum, hand the exact result to :func:`to_lora`.

    Args:
      W: (N, K) the weight that all of them were trained on, (K, N) with fan_in_fan_out, or (N, K, kh, kw).
      adapters: of any rank, all with one norm_axis and one fan_in_fan_out.
      weights: a finite number for each.
      r: rank of the result; None, or more than sum r_i, is sum r_i.
      max_error: most relative error to put up with.

    Returns:
      ``(adapter, error)``: s = 1, A, B and m float32 (float64 for a float64 W); error is ``||got - want|| / ||want||`` of the
      change W' - W, 0 where nothing changes.

    Raises:
      FdoraError: nothing to combine, numbers of adapters and weights differ, norm_axis or fan_in_fan_out differs, shapes or
        devices disagree, something is not finite, or the error is above max_error.

    Memory: (N + K) sum r_i numbers and one block of rows; no dense B A.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5. The derivation stands at the top of this file.
    """
    fn = "convert.combine"
    if len(adapters) == 0 or len(adapters) != len(weights):
        have = f"{len(weights)} for {len(adapters)}"
        raise fail(fn, "weights", "one number for each adapter", have, "Pass at least one of each.")
    for w in weights:
        if not math.isfinite(w):
            raise fail(fn, "weights", "finite", w, "Pass one finite number for each adapter.")
    if len({p.fan_in_fan_out for p in adapters}) > 1:
        raise fail(fn, "adapters", "of one fan_in_fan_out", "both", "It says how W is stored: set it with _replace.")
    axes = {p.norm_axis for p in adapters if p.m is not None}
    if len(axes) > 1:
        raise fail(fn, "adapters", "of one norm_axis", "0 and 1", "Turn those of one kind into LoRA first, with to_lora.")
    like = adapters[0]._replace(norm_axis=axes.pop() if axes else 1)
    V, _, _ = to_rows(W, like)
    want = weighted_sum([change_of(W, p._replace(norm_axis=like.norm_axis)) for p in adapters], list(weights))
    _check_finite(fn, V, want)
    g, P, Q = 1 + want.d, want.P, want.Q
    if r is not None and r < P.shape[1]:
        check_rank(fn, r)
        P, Q = _cut(P, Q, r)
        g = g + _along(V, want.P, want.Q, P, Q)
    g = _kept_off_zero(V, g, P, Q)
    A, B = Q, torch.where(g == 0, 0, 1 / g)[:, None] * P
    m = g * dora_norm(V, A, B, s=1.0)
    error = relative_error(V, Change(g - 1, g[:, None] * B, A), want)
    _check_error(fn, error, max_error, Q.shape[0], f"{want.Q.shape[0]} is exact")
    return Adapter(*from_rows(A, B, like), m, 1.0, like.norm_axis, like.fan_in_fan_out), error


@torch.no_grad()
def to_lora(W: Tensor, p: Adapter, *, r: int, max_error: float | None = None) -> tuple[Adapter, float]:
    """The nearest plain LoRA: the best rank-r ``B @ A`` for ``W' - W = g (W + s B A) - W``.

    g - 1 multiplies all of W, so the change has full rank and no LoRA of small r is equal to it. The error says by how much.

    Args:
      W: (N, K) the weight that the adapter was trained on, (K, N) with fan_in_fan_out, or (N, K, kh, kw).
      p: the adapter.
      r: rank of the result, at most min(N, K).
      max_error: most relative error to put up with.

    Returns:
      ``(adapter, error)``: m is None and s = 1, A and B float32 (float64 for a float64 W), their singular values shared
      evenly; error is ``||B A - (W' - W)|| / ||W' - W||``. The same bits every time: the start of the iteration is fixed.

    Raises:
      FdoraError: shapes or devices disagree, something is not finite, or the error is above max_error.

    Memory: (N + K) (r + 16) numbers and one block of rows; no dense change.
    References: Halko, Martinsson and Tropp, 2011, arXiv:0909.4061, algorithm 4.4.
    """
    fn = "convert.to_lora"
    V, _, _ = to_rows(W, p)
    want = change_of(W, p)
    _check_finite(fn, V, want)
    N, K = V.shape
    if not 1 <= r <= min(N, K):
        raise fail(fn, "r", f"in [1, {min(N, K)}] for this weight", r, "Merge the adapter where you need all of it.")
    start = torch.randn(K, min(r + OVERSAMPLING, N, K), generator=torch.Generator().manual_seed(0), dtype=want.d.dtype)
    Y = torch.linalg.qr(times(V, want, start.to(W.device)))[0]
    for _ in range(ITERATIONS):
        X = torch.linalg.qr(transposed_times(V, want, Y))[0]
        Y = torch.linalg.qr(times(V, want, X))[0]
    B, A = _cut(Y, transposed_times(V, want, Y).T, r)
    error = relative_error(V, Change(torch.zeros_like(want.d), B, A), want)
    _check_error(fn, error, max_error, r, "Merge instead, or keep the magnitude")
    return Adapter(*from_rows(A, B, p), None, 1.0, fan_in_fan_out=p.fan_in_fan_out), error


def _cut(P: Tensor, Q: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """The best rank-r part of P Q, its singular values shared evenly."""
    Up, Rp = torch.linalg.qr(P)
    Uq, Rq = torch.linalg.qr(Q.T)
    U, S, Vh = torch.linalg.svd(Rp @ Rq.T)
    root = S[:r].sqrt()
    return Up @ (U[:, :r] * root), (Uq @ (Vh[:r].T * root)).T


def _along(V: Tensor, P: Tensor, Q: Tensor, P_r: Tensor, Q_r: Tensor) -> Tensor:
    """<E_n, V_n> / ||V_n||^2 of E = P Q - P_r Q_r; 0 for a row of zeros."""
    sq = dora_base_sqnorm(V)
    inner = [(torch.cat((P[i:j], -P_r[i:j]), 1) * (V[i:j].to(P.dtype) @ torch.cat((Q, Q_r)).T)).sum(1) for i, j in blocks(V)]
    return torch.where(sq > 0, torch.cat(inner) / sq, 0)


def _kept_off_zero(V: Tensor, g: Tensor, P: Tensor, Q: Tensor) -> Tensor:
    """Where the sum cancels W itself, a row of it as small as float32 can carry beside the rest stays."""
    _, Rq = torch.linalg.qr(Q.T)
    size, base = torch.linalg.vector_norm(P @ Rq.T, dim=1), dora_base_sqnorm(V).sqrt()
    least = torch.where(base > 0, SMALL * size / base, 0)
    return torch.where(g.abs() < least, torch.where(g < 0, -least, least), g)


def _check_finite(fn: str, V: Tensor, want: Change) -> None:
    # a row of W that is infinite has a norm that is, and g = 0
    if not all(t.isfinite().all() for t in (*want, *(V[i:j] for i, j in blocks(V)))):
        remedy = "Look for NaN and infinity in A, B, m and W: the training may have diverged."
        raise fail(fn, "adapters", "finite, and W with them", "a change of W that is not", remedy)


def _check_error(fn: str, error: float, max_error: float | None, r: int, remedy: str) -> None:
    if max_error is not None and not error <= max_error:
        raise FdoraError(
            f"fdora.{fn}: the error must be at most {max_error} (`max_error`), got {error:.3g} at rank {r}. "
            f"Raise r or max_error. {remedy}."
        )
