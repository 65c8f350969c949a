"""``c_a = ||W + s_a B_a A_a||`` of every adapter, nothing of size (N, K) written; compare norm.py.

In general the kernel of norm.py has another axis of programs, of experts, each with a W of its own, or of adapters of one. A
kernel of their own, which kept a tile of W while the adapters passed, took 1.6 times as long for four of them (h200/norm_many).

With small ranks of half precision that is bound by instructions: two sums for each element and adapter. So there the square
is multiplied out,

    c_n^2 = ||W_n||^2 + <b_n, 2 s A W_n> + <b_n, s^2 A A^T b_n>,

A W^T being one product for adapters whose ranks lie side by side, and each tile of W is read once for as many as fit. More
read W again, out of the cache: they run beside the first. Each term is good to 1e-7 of itself; where they cancel to less than
half of the first and last, c would not be, and the rows are summed as above, by the kernel that adds (strip_root_kernel).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora.triton.kernels.multi_norm import (
    strip_norm_kernel,
    strip_root_kernel,
)
from fdora.triton.multi_rows import rank_table
from fdora.triton.norm import squares
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, cdiv
from fdora.triton.split import Factors
from fdora.triton.sums import column_sums
from fdora.triton.tiles.configs import MAX_N, MIN_K, power_of_two

SMALL_R = 32
ROOT_N, ROOT_K = 64, 64
# Of ||W_n||^2 + ||s (B A)_n||^2: at this share errors of 1e-7 in each term are at most 4e-7 of c^2. A random update of any
# size leaves 1 but for some 1 / sqrt(K), and a trained one has to lie against W as much as along it to come near.
CANCELLED = 0.5


class StripConfig(NamedTuple):
    """Tile of W, tiles under way, warps, and ranks beside each other. ``BESIDE``: programs of a multiprocessor."""

    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    num_warps: int
    BESIDE: int = 2
    WIDTH: int = 64


def strip_config(capability: int) -> StripConfig:
    """From h200/multi_strips.json, where W has 16 and 59 million elements. An AMD GPU has 64 KiB of shared memory."""
    return StripConfig(64, 64, 6 if capability else 3, 4)


def bank_norm(
    W: Tensor, A: Tensor, B: Tensor, s: Tensor, ranks: tuple[int, ...] | None, max_bytes: int | None = None
) -> Tensor:
    """(N, K), (G, r, K), (G, N, r), (G,) -> c (G, N) float32. ``max_bytes`` bounds the partials. W (G, N, K): of experts."""
    if A.dtype != B.dtype:  # a kernel multiplies operands of one dtype
        A, B = A.float(), B.float()
    c: Tensor = plan_bank_norm.call(W, A, B, s, list(ranks or ()), max_bytes)
    return c


@planned(
    "row_norms(Tensor W, Tensor A, Tensor B, Tensor s, SymInt[] ranks, int? max_bytes) -> Tensor",
    "norms of a bank",
    "matrix matrix matrix vector",
    lambda W, A, *_: {"c": ((A.shape[0], W.shape[-2]), torch.float32)},
)
def plan_bank_norm(
    plan: Builder, W: Array, A: Array, B: Array, s: Array, ranks: tuple[int, ...], max_bytes: int | None
) -> None:
    (N, K), (G, R, _), (c,) = W.shape[-2:], A.shape, plan.wanted()
    table = rank_table(plan, ranks or None)
    half = A.dtype == B.dtype and A.itemsize == 2
    own_W, half_weight = len(W.shape) == 3, W.itemsize == 2
    strip = strip_config(plan.device.capability)
    span = span_of(N, K, R, G, strip, plan.device.num_sms)
    # The products A A^T of all spans are beside the partials whatever the rows.
    room = max_bytes is None or 2 * gram_bytes(cdiv(K, span), G, R) <= max_bytes
    if half and half_weight and not own_W and R <= SMALL_R and room:
        plan.path = "one pass over W for all adapters, nothing of its size written"
        return _by_strips(plan, W, A, B, s, table, c, strip, span, max_bytes)
    plan.path = f"one pass over {'all W' if own_W else 'W for each adapter'}, nothing of its size written"
    if not own_W:  # one W for each: adapters are experts that share theirs
        W = replace(W, shape=(G, N, K), stride=(0, *W.stride))
    rows = N if max_bytes is None else max(1, max_bytes // (4 * max(1, cdiv(K, MIN_K)) * G * MAX_N)) * MAX_N
    for i in range(0, N, max(1, rows)):
        of = Factors(A, B.rows(i, i + rows, 1), None, None)
        partial = squares(plan, W.rows(i, i + rows, 1), of, s, ranks=table)
        column_sums(plan, partial, c.columns(i, i + rows), sqrt=True)


def span_of(N: int, K: int, R: int, G: int, strip: StripConfig, num_sms: int) -> int:
    """Columns of a program: those with the fewest for a multiprocessor, a wave costing as much as 256 of them besides."""
    room = max(1, strip.BESIDE * num_sms)
    others = cdiv(N, strip.BLOCK_N) * cdiv(G, max(1, strip.WIDTH // power_of_two(R)))
    spans = {cdiv(max(1, cdiv(K, parts)), strip.BLOCK_K) * strip.BLOCK_K for parts in range(1, max(1, cdiv(K, 256)) + 1)}
    return min(spans, key=lambda span: (cdiv(others * cdiv(K, span), room) * (span + 256), -span))


def gram_bytes(spans: int, G: int, R: int) -> int:
    return 4 * spans * G * power_of_two(R) ** 2


def _by_strips(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    s: Array,
    table: Array | None,
    c: Array,
    strip: StripConfig,
    span: int,
    max_bytes: int | None,
) -> None:
    (N, K), (G, R, _) = W.shape, A.shape
    spans, block_r = cdiv(K, span), power_of_two(R)
    adapters, rows = strip.WIDTH // block_r, N
    if max_bytes is not None:
        left = max_bytes - gram_bytes(spans, G, R)
        rows = max(strip.BLOCK_N, left // (4 * spans * (G + 1)) // strip.BLOCK_N * strip.BLOCK_N)
    even = (
        N % strip.BLOCK_N == 0 and rows % strip.BLOCK_N == 0 and K % strip.BLOCK_K == 0 and block_r == R and G % adapters == 0
    )
    exact = "tf32x3" if plan.device.capability else "ieee"
    pdl = plan.pdl
    for i in range(0, N, max(1, rows)):
        w, b = W.rows(i, i + rows, -2), B.rows(i, i + rows, 1)
        own = b.shape[1]
        partial = plan.temp((spans * (G + 1), own))
        grams = plan.temp((spans * G, block_r * block_r))
        given: dict[str, Any] = {"W": w, "A": A, "B": b, "s": s, "ranks": table, "partial": partial, "grams": grams}
        given |= {"N": own, "K": K, "R": R, "G": G, "BLOCK_R": block_r, "PDL": pdl}
        grid = (cdiv(G, adapters), cdiv(own, strip.BLOCK_N) + 1, spans)
        plan.launch(strip_norm_kernel, grid, {**given, "span": span, "ADAPTERS": adapters, "EVEN": even}, strip)
        given |= {"c": c, "spans": spans, "first": i, "width": N, "BLOCK_N": ROOT_N, "BLOCK_K": ROOT_K}
        given |= {"PRECISION": exact, "CANCELLED": CANCELLED}
        plan.launch(strip_root_kernel, (cdiv(own, ROOT_N), G), given, pdl=pdl)
