"""Row norms: ``c = ||W + s B A||`` without the dense product.

Two forms of the same number.

direct    c_n^2 = sum_k (W + s B A)_nk^2, one tile of rows and columns at a time. No cancellation: 1e-7 relative.
factored  c_n^2 = ||W_n||^2 + 2 s <W_n, (BA)_n> + s^2 ||(BA)_n||^2
                = base_n + sum_j B_nj (2 s U + s^2 B G)_nj,   U = W A^T (N, r),  G = A A^T (r, r)
          (Scaling DoRA, arXiv:2603.22276, eq. 3). O(N r + r^2) memory, and base_n can be reused while W is frozen. Where
          the three terms cancel it loses digits, so those rows are computed again directly.

direct is the default: at 4096 x 4096, r = 384 in float32 on two cores it measured 85 ms against 89 (factored, base given)
and 154 (dense), because its tiles stay in cache, and it is exact where factored cancels; `python -m bench.norm_forms` prints
the table. factored runs when the caller brings base_n and the values can be read (the rows to repeat are chosen by value).

Backward, only when c is not detached. With v = W + s B A and c = ||v||, dv = (dc / c) v. Let u = dc / c:
    dB = s dv A^T = s u (W A^T + s B (A A^T))
    dA = s B^T dv = s ((uB)^T W + s ((uB)^T B) A)
W is read once for each, in its own dtype: A and u B, where they are wider, as two terms that are good to 2^-17.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fdora._records import NormOf, Onto, eps
from fdora.eager._fingerprint import WORDS as WORDS
from fdora.eager._fingerprint import fingerprint
from fdora.eager._matmul import acc_dtype, cast, is_plain, matmul

# A row is repeated when its terms add up to less than this share of the first: the others are then nearly its negative,
# and float32 sums that are good to 3e-7 of it leave 3e-7 / 0.25 / 2 of c.
CANCELLED = 0.25


def scale(m: Tensor, c: Tensor) -> Tensor:
    """g = m / max(c, eps) in the dtype of c; a NaN in c stays NaN."""
    return m.to(c.dtype) / c.clamp_min(eps())


def default_bytes(device: torch.device) -> int:
    """Tiles that stay in a CPU's cache are the fastest there; elsewhere, and in traced code, few large ones."""
    return 12 << 20 if device.type == "cpu" and not torch.compiler.is_compiling() else 64 << 20


def smallest_bytes(W: Tensor, A: Tensor, B: Tensor, factored: bool) -> int:
    """The least workspace norm_fwd can honour: the result, A A^T where needed, and a tile of 16 x 16."""
    tile = _tile_bytes(W, A, B, factored, 16, 16)
    return max(2 * tile, 4 * W.element_size() * W.shape[1]) if factored else tile


def norm_fwd(of: NormOf) -> Tensor:
    """c (N,) in acc_dtype(W.dtype)."""
    W, A, B, s, base_sqnorm, max_bytes = of
    budget = default_bytes(W.device) if max_bytes is None else max_bytes
    if base_sqnorm is None or not (is_plain(W) and is_plain(A) and is_plain(B)):
        rows, cols = tile_of(W, A, B, False, budget)
        return _direct(W, A, B, s, rows, cols)
    rows, cols = tile_of(W, A, B, True, budget)
    sq = _factored(W, A, B, base_sqnorm, s, rows, cols)
    lost = (sq < CANCELLED * base_sqnorm).nonzero().squeeze(1)  # NaN compares false: the row keeps its NaN
    c = sq.clamp_min_(0).sqrt_()
    rows, cols = tile_of(W, A, B, False, budget // 2)  # the other half holds the gathered rows of W
    rows = max(1, min(rows, budget // (2 * W.element_size() * max(1, W.shape[1]))))
    for part in lost.split(rows):
        c[part] = _direct(W[part], A, B[part], s, rows, cols)
    return c


def sqnorm_fwd(of: NormOf) -> Tensor:
    """c^2 (N,), to be added to that of other columns: the rounding of the root is all that it costs, 6e-8 relative."""
    return norm_fwd(of).square()


def norm_guarded(of: NormOf, c: Tensor, seen: Tensor, norm: Callable[[NormOf], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """c and the fingerprint of A, B, s. The c given is returned where the fingerprint given is theirs. ``norm``: of another
    backend than this.

    Work is saved only where values can be read for free; elsewhere both are computed and the device chooses.
    """
    now = fingerprint(of.A, of.B, of.s, default_bytes(of.W.device) if of.max_bytes is None else of.max_bytes)
    norm = norm or norm_fwd
    if is_plain(now) and is_plain(seen):
        return (c.clone() if torch.equal(now, seen) else norm(of)), now
    return torch.where((now == seen).all(), c, norm(of)), now


def base_sqnorm(W: Tensor, max_bytes: int | None) -> Tensor:
    """(N, K) -> ||W_n||^2 (N,) in acc_dtype(W.dtype)."""
    acc = acc_dtype(W.dtype)
    if W.dtype == acc:
        return torch.linalg.vector_norm(W, dim=1).square()
    budget = default_bytes(W.device) if max_bytes is None else max_bytes
    rows = max(1, budget // (4 * max(1, W.shape[1])))
    parts = [torch.linalg.vector_norm(W[i:j].to(acc), dim=1).square() for i, j in blocks(W.shape[0], rows)]
    return torch.cat(parts)


def norm_bwd(
    dc: Tensor, W: Tensor, A: Tensor, B: Tensor, c: Tensor, s: float, needs: tuple[bool, bool], onto: Onto = (None, None)
) -> tuple[Tensor | None, Tensor | None]:
    """dA, dB of c = ||W + s B A||, each only when needed and added to its part of ``onto``. A row with c = 0 has no direction:
    its gradient is zero."""
    acc = acc_dtype(W.dtype)
    a, b = A.to(acc), B.to(acc)
    u = torch.where(c > 0, dc / c, 0)[:, None]
    ub = u * b
    dA = dB = None
    if needs[0]:
        dA = _added(s * (_times(ub.T, W, 2) + s * ((ub.T @ b) @ a)), onto[0], A.dtype)
    if needs[1]:
        U = _times(a, W.T, 1 if A.dtype == W.dtype else 2).T
        dB = _added(s * u * (U + s * (b @ (a @ a.T))), onto[1], B.dtype)
    return dA, dB


def _added(d: Tensor, onto: Tensor | None, dtype: torch.dtype) -> Tensor:
    return cast(d if onto is None else d + onto, dtype)


def _times(b: Tensor, W: Tensor, terms: int) -> Tensor:
    """b W for a b in acc_dtype. Of a half-precision W no wider copy: b, scaled by a power of two, is a sum of terms like W."""
    if W.dtype == b.dtype:
        return b @ W
    largest = b.abs().amax() if b.numel() else b.new_ones(())
    unit = torch.exp2(torch.floor(torch.log2(torch.where(largest > 0, largest, 1))))
    rest, parts = b / unit, []
    for _ in range(terms):
        parts.append(rest.to(W.dtype))
        rest = rest - parts[-1].to(b.dtype)
    found = matmul(torch.cat(parts), W).split(b.shape[0])
    return (found[0] if terms == 1 else found[0] + found[1]) * unit


def direct(W: Tensor, A: Sequence[Tensor], B: Sequence[Tensor], s: Sequence[Any], rows: int, cols: int) -> list[Tensor]:
    """c of some adapters of one W, (adapters, n) for each block of rows: a tile of W serves all of them at once."""
    acc, c = acc_dtype(W.dtype), []
    for i, j in blocks(W.shape[0], rows):
        scaled = [each * b[i:j].to(acc) for each, b in zip(s, B, strict=True)]
        parts = []
        for k, l in blocks(W.shape[1], cols):
            w = W[i:j, k:l].to(acc)
            pairs = zip(A, scaled, strict=True)
            parts.append(torch.stack([torch.linalg.vector_norm(torch.addmm(w, b, a[:, k:l].to(acc)), dim=1) for a, b in pairs]))
        c.append(parts[0] if len(parts) == 1 else sum([v.square() for v in parts[1:]], parts[0].square()).sqrt())
    return c


def _direct(W: Tensor, A: Tensor, B: Tensor, s: float, rows: int, cols: int) -> Tensor:
    return torch.cat([c[0] for c in direct(W, [A], [B], [s], rows, cols)])


def _factored(W: Tensor, A: Tensor, B: Tensor, base: Tensor, s: float, rows: int, cols: int) -> Tensor:
    """c^2, negative where rounding leaves less than nothing."""
    acc, (N, K), r = acc_dtype(W.dtype), W.shape, A.shape[0]
    G = A.new_zeros((r, r), dtype=acc)
    for k, l in blocks(K, cols):
        a = A[:, k:l].to(acc)
        G.addmm_(a, a.T)
    sq = base.to(acc, copy=True)
    for i, j in blocks(N, rows):
        b = B[i:j].to(acc)
        U = W.new_zeros((j - i, r), dtype=acc)
        for k, l in blocks(K, cols):
            U.addmm_(W[i:j, k:l].to(acc), A[:, k:l].to(acc).T)
        quad = (b @ G).mul_(b).sum(1).mul_(s * s)
        sq[i:j] += U.mul_(b).sum(1).mul_(2 * s).add_(quad)
    return sq


def blocks(n: int, step: int) -> list[tuple[int, int]]:
    """[0, n) in even runs of at most ``step``; one empty run when n is 0."""
    count = max(1, -(-n // max(1, step)))
    edges = [n * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _tile_bytes(W: Tensor, A: Tensor, B: Tensor, factored: bool, rows: int, cols: int) -> int:
    """Peak workspace of one tile. An operand that is not in acc, or that BLAS cannot stride over, is copied."""
    acc, (N, K), r = acc_dtype(W.dtype), W.shape, A.shape[0]
    # Dynamo fails at strides that it took for dynamic and then found to be constant: few tensors need to be asked for them
    copied = [t.dtype != acc or not (t.is_contiguous() or 1 in t.stride()) for t in (W, A, B)]
    rows, cols = min(rows, N), min(cols, K)
    elements = copied[1] * r * cols + (1 + copied[2]) * rows * r
    if factored:
        elements += 3 * N + r * r + 2 * rows * r + copied[0] * rows * cols
    else:
        elements += 2 * N + rows + rows * cols * (1 + copied[0])
    return elements * acc.itemsize


def tile_of(W: Tensor, A: Tensor, B: Tensor, factored: bool, budget: int) -> tuple[int, int]:
    """The largest (rows, cols) whose workspace fits: whole rows of K while at least 64 of them fit, then fewer columns."""
    N, K = W.shape
    cols = max(1, K)
    while cols > 16 and _tile_bytes(W, A, B, factored, min(64, N), cols) > budget:
        cols = max(16, cols // 2)
    rows = 16
    while rows < N and _tile_bytes(W, A, B, factored, 2 * rows, cols) <= budget:
        rows *= 2
    return rows, cols
