"""The row norm of W + s B A where W is codes and scales: decoded in registers, no dense W, or a dense W out of the same pass.

A program walks a run of tiles of the same rows, with the codes of the next on their way, and writes one partial sum
per row, which a second kernel adds in a fixed order. What a tile costs to decode, and the roofs: kernels/quant.py.

The number is that of the float32 weights w = value(code) * scale, rounded once. A nested scale is
``code256[code] * scales2 + offset``, rounded twice, as bitsandbytes has it; one in e4m3 is rounded after the global scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdora.quant import Lut4, QuantSpec
from fdora.triton.codes import (
    LOOKUP,
    Coded,
    Packed,
    coded_of,
    decoding,
    in_pairs,
    is_decoded,
    of_weight,
    packed,
    tensors_of,
    written,
)
from fdora.triton.copy import in_dtype
from fdora.triton.hash import WORDS, fingerprint
from fdora.triton.kernels.quant import quant_kernel
from fdora.triton.norm import GROUP_N, Guard, chosen, hashes_of
from fdora.triton.op import planned
from fdora.triton.quant_strips import squares_along_strips, strips_of
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar, Tile
from fdora.triton.split import rows_at_a_time, split_A, split_B
from fdora.triton.sums import column_sums
from fdora.triton.tiles.quant import quant_config, run_of


def quant_norm(W: Coded, tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, squared: bool = False) -> Tensor:
    """c (N,) float32 of W + s B A, or its square."""
    text, numbers = written([W])
    c: Tensor = _row_norm(A, B, list(tensors), s, text, numbers, squared)
    return c


def norm_of_codes(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, squared: bool
) -> Tensor | None:
    """:func:`quant_norm` of a QuantWeight; None where no kernel reads its format."""
    if not is_decoded(spec):
        return None
    return quant_norm(coded_of(spec), tensors_of(tensors), A, B, s, squared)


def norm_of_codes_guarded(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, c: Tensor, old_hash: Tensor
) -> tuple[Tensor, Tensor] | None:
    """c and the fingerprint of A, B, s, as norm_guarded of norm.py has them; None where no kernel reads the format."""
    if not is_decoded(spec):
        return None
    text, numbers = written([coded_of(spec)])
    c, new_hash = _row_norm_guarded(A, B, c, old_hash, tensors_of(tensors), s, text, numbers)
    return c, new_hash


def stack_norms_of_codes(spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float) -> Tensor | None:
    """c (E, N) float32 of a W (E N, K) whose experts are one behind the other, A (E, r, K) and B (E, N, r)."""
    if not is_decoded(spec):
        return None
    text, numbers = written([coded_of(spec)])
    c: Tensor = _stack_norms(A, B, tensors_of(tensors), s, text, numbers)
    return c


def plan_stack_norms(likes: Sequence[Like | None], device: Device, coded: Coded) -> Plan:
    """likes: A, B, then those of the weight. Pure. Two launches for each expert, which share their temporaries."""
    plan = Builder("norms of experts of codes", device)
    A, B = map(plan.matrix, likes[:2])
    W = packed(plan, likes[2:], coded)
    (E, N, _), s = B.shape, plan.scalar("s")
    c = plan.result("c", (E, N), torch.float32)
    plan.path = "one pass over the codes of each expert, nothing of the size of W written"
    for e in range(E):
        norm(plan, W, A[e], B[e], s, c[e], first=e * N)
    return plan.plan()


def plan_quant_norm(likes: Sequence[Like | None], device: Device, coded: Coded, squared: bool) -> Plan:
    """likes: A, B, then those of the weight. Pure."""
    plan = Builder("dora_norm of codes", device)
    A, B = map(plan.matrix, likes[:2])
    W = packed(plan, likes[2:], coded)
    s, c = plan.scalar("s"), plan.result("c", (W.shape[0],), torch.float32)
    plan.path = "one pass over the codes, nothing of the size of W written"
    norm(plan, W, A, B, s, c, squared=squared)
    return plan.plan()


def plan_guarded_quant_norm(likes: Sequence[Like | None], device: Device, coded: Coded) -> Plan:
    """likes: A, B, the norm and the fingerprint of before, then those of the weight. Pure."""
    plan = Builder("dora_norm of codes where A, B or s changed", device)
    A, B = map(plan.matrix, likes[:2])
    before, old_hash = plan.vector(likes[2]), plan.vector(likes[3])
    W = packed(plan, likes[4:], coded)
    s, c = plan.scalar("s"), plan.result("c", (W.shape[0],), torch.float32)
    new_hash = plan.result("fingerprint", (WORDS,), torch.int64)
    fingerprint(plan, A, B, s, new_hash)
    plan.path = "one pass over the codes, or none: the kernels return at once where A, B and s are what they were"
    norm(plan, W, A, B, s, c, guard=Guard(before, old_hash, new_hash, False))
    return plan.plan()


def norm(
    plan: Builder,
    W: Packed,
    A: Array,
    B: Array,
    s: Scalar,
    c: Array,
    dense: Array | None = None,
    squared: bool = False,
    guard: Guard | None = None,
    first: int = 0,
) -> None:
    """Into c (N,) float32, of N rows of W from ``first`` on; W, too, into ``dense``."""
    (N, R), K = B.shape, W.shape[1]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = in_dtype(plan, A, torch.float32), in_dtype(plan, B, torch.float32)
    rows = 0 if A.itemsize == 2 else rows_at_a_time(N, K, R, None, 4 * max(1, cdiv(K, 64)))
    split = rows > 0
    if split:
        plan.path += "; float32 factors as float16 ones of three times the rank"
    hashes = hashes_of(guard)
    a, by_k = split_A(plan, A, hashes) if split else (A, None)
    for i in range(0, N, rows or max(1, N)):
        j = min(N, i + (rows or N))
        b, by_n = split_B(plan, B.rows(i, j), hashes) if split else (B.rows(i, j), None)
        part = None if guard is None else guard._replace(c=guard.c.rows(i, j))
        strips = None if split or dense is not None else strips_of(plan, W, a)
        if strips is not None:
            partial = squares_along_strips(plan, W, a, b, s, first + i, part, strips)
        else:
            partial = _squares_of_tiles(plan, W, Factors(a, b, by_n, by_k), dense, s, first + i, part)
        if part is None:
            column_sums(plan, partial, c.rows(i, j), sqrt=not squared)
        else:
            chosen(plan, partial, c.rows(i, j), part)


class Factors(NamedTuple):
    """Those of some rows, and what they were scaled by where they were split into terms."""

    A: Array
    B: Array
    by_n: Array | None
    by_k: Array | None


def _squares_of_tiles(
    plan: Builder, W: Packed, of: Factors, dense: Array | None, s: Scalar, first: int, guard: Guard | None
) -> Array:
    """(runs, N): a run is some tiles of the same rows."""
    A, B, by_n, by_k = of
    N, K, R, capability = B.shape[0], W.shape[1], A.shape[0], plan.device.capability
    aligned = is_tma_compatible(A) and is_tma_compatible(B)
    wide = isinstance(W.form, Lut4) and W.form.group >= 32 and by_n is None
    config = quant_config(R, A.itemsize == 2, capability, in_pairs(W.form, K), wide, aligned, dense is not None)
    block_n, block_k, block_r, tma = *config[:3], config.TMA
    run = config.RUN
    run = run or (run_of(cdiv(N, block_n), cdiv(K, block_k), plan.device.num_sms) if comes_ahead(W, block_k) else 1)
    runs = cdiv(K, block_k * run)
    partial = plan.temp((runs, N), torch.float32)
    programs, pdl = cdiv(N, block_n) * runs, guard is not None and plan.device.supports_pdl
    if guard is not None or tma:  # three programs of 64 x 128 fit on a multiprocessor, one that TMA feeds
        programs = min(programs, (1 if tma else 3) * plan.device.num_sms)
    factors = (Tile(A, (block_r, block_k)), Tile(B, (block_n, block_r))) if tma else (A, B)
    given = {
        **decoding(W, capability, LOOKUP),
        **named("A B", factors),
        **named("old_hash new_hash", hashes_of(guard)),
        **{"scale_n": by_n, "scale_k": by_k, "partial": partial, "s": s, "first": first, "N": N, "K": K, "R": R},
        **{"dense": dense, "pitch": 0 if dense is None else dense.stride[0]},
        **{"RUN": run, "GROUP": GROUP_N, "ONE_SLAB": block_r >= R, "WORDS": WORDS},
        "EVEN": N % block_n == 0 and K % block_k == 0 and R % block_r == 0,
    }
    plan.launch(quant_kernel, (programs,), given, config, pdl=pdl)
    return partial


def comes_ahead(W: Packed, block_k: int) -> bool:
    """Whether a kernel fetches the next tile's codes early. Beside a scale or an address for each code it would spill."""
    if isinstance(W.form, Lut4):
        return in_pairs(W.form, W.shape[1])
    return W.form.scale != "block" or W.form.block[1] % block_k == 0


quant_stack_norms, _stack_norms = planned(
    "quant_stack_norms",
    "(Tensor A, Tensor B, Tensor[] tensors, float s, str[] text, SymInt[] numbers) -> Tensor",
    of_weight(plan_stack_norms),
    lambda A, B, *_: (B.shape[:2], torch.float32),
)
quant_row_norm_guarded, _row_norm_guarded = planned(
    "quant_row_norm_guarded",
    "(Tensor A, Tensor B, Tensor c, Tensor old_hash, Tensor[] tensors, float s, str[] text, SymInt[] numbers) -> Tensor[]",
    of_weight(plan_guarded_quant_norm),
    lambda A, B, c, *_: [(B.shape[:1], torch.float32), ((WORDS,), torch.int64)],
)
quant_row_norm, _row_norm = planned(
    "quant_row_norm",
    "(Tensor A, Tensor B, Tensor[] tensors, float s, str[] text, SymInt[] numbers, bool squared) -> Tensor",
    of_weight(plan_quant_norm),
    lambda A, B, *_: (B.shape[:1], torch.float32),
)
