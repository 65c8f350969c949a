"""The gradients of an adapted table whose norm is that of columns; formulas in fdora/eager/embedding.py.

One pass over dy and the rows of W. With h_t = A^T[id of t], Y = sum_t dy_t^T h_t (d, r) and g = m / c:
    dA_v = sum of dy_t (s g B) over the tokens of v    dB = s g Y    dm = (sum_t dy_t w_t + s sum_r B Y) / c    dc = -dm g
so neither the rows nor dz are formed: dm's term of low rank is a sum of what dB already is. A program has a strip of columns
and some tokens; parts are added in their order, without atomics.

dA: the tokens are sorted by their number (torch.sort, stable); blocks of them sum up what shares a number, and a number that
goes on in the next block takes the sums of the blocks that end in it. Only columns that were read are written, into zeros;
``sparse`` leaves the zeros out. Roof: dy and the rows once, 4 d bytes a token; (r, V) zeros; 4 r bytes a token for each strip,
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import Lookup, Needs
from fdora.triton.embedding import call_of, ready
from fdora.triton.kernels.embedding_bwd import (
    embedding_bwd_kernel,
    embedding_finish_kernel,
    segment_scan_kernel,
    segment_total_kernel,
)
from fdora.triton.op import Likes, planned
from fdora.triton.runtime import Array, Builder, asked, cdiv, named
from fdora.triton.tiles.configs import power_of_two

WHOLE = 64  # the largest rank: sums of (columns, r) stay in registers
TILE = {"BLOCK_T": 32, "BLOCK_D": 128}
SEGMENT, CARRIES = 64, 64  # tokens of a block, and blocks that are looked at together
FINISH_D = 32
NO_PADDING = -(1 << 31)


def embedding_bwd(
    dy: Tensor, ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, how: Lookup, needs: Needs
) -> tuple[Tensor | None, ...] | None:
    """dA, dB, dm, dc; each only when needed. None for what plain torch must do: m of each row, a rank above 64, no tokens."""
    if how.per_row or how.max_norm is not None or c is None or not serves(ids, A):
        return None
    flat = ids.reshape(-1)
    key, order = torch.sort(flat, stable=True) if needs.A else (None, None)
    padding = padding_of(how.padding_idx, W.shape[0])
    wanted = [needs.A, needs.B, needs.m, needs.c]
    rows, sparse = dy.reshape(flat.shape[0], W.shape[1]), how.sparse
    found = iter(plan_backward.call(rows, flat, W, A, B, m, c, key, order, how.s, padding, sparse, wanted))
    dA, dB, dm, dc = (next(found) if need else None for need in wanted)
    if sparse and dA is not None:
        assert key is not None
        dA = _sparse(dA, key, A, padding)
    return dA, dB, dm, dc


def serves(ids: Tensor, A: Tensor) -> bool:
    return A.shape[0] <= WHOLE and ids.numel() > 0


def padding_of(padding_idx: int | None, V: int) -> int:
    """A number that no token has, or that of the padding row."""
    return NO_PADDING if padding_idx is None else padding_idx % V


def _sparse(sums: Tensor, key: Tensor, A: Tensor, padding: int) -> Tensor:
    """The sums at the last token of each number, as the columns of a coalesced tensor. The host waits to hear how many."""
    last = torch.cat([key[1:] != key[:-1], key.new_ones(1, dtype=torch.bool)]) & (key != padding)
    # explain's tensors have no numbers: as if all tokens differed
    places = torch.arange(len(key), device="meta") if key.device.type == "meta" else last.nonzero().squeeze(1)
    (r, V), n = A.shape, places.shape[0]
    at = torch.stack([torch.arange(r, device=key.device).repeat_interleave(n), key[places].long().repeat(r)])
    values = sums[places].T.to(A.dtype).reshape(-1)
    return torch.sparse_coo_tensor(at, values, (r, V), is_coalesced=True, check_invariants=False)


def _forms(dy: Any, ids: Any, table: Likes, padding: Any, sparse: bool, needs: Sequence[bool]) -> dict[str, Any]:
    """Of each gradient that is asked for."""
    _, A, B, m, *_ = table
    of_A = ((ids.shape[0], A.shape[0]), torch.float32) if sparse else (A.shape, A.dtype)
    return asked({"dA": of_A, "dB": (B.shape, B.dtype), "dm": (m.shape, m.dtype), "dc": (m.shape, torch.float32)}, needs)


@planned(
    "embedding_backward(Tensor dy, Tensor ids, Tensor W, Tensor A, Tensor B, Tensor m, Tensor c, Tensor? key, Tensor? order, "
    "float s, SymInt padding, bool sparse, bool[] needs) -> Tensor[]",
    "dora_embedding backward",
    "tokens vector rest",
    _forms,
    asks=(2, 0),
)
def plan_backward(
    plan: Builder, dy: Array, ids: Array, likes: Likes, padding: int, sparse: bool, needs: tuple[bool, ...]
) -> None:
    call = call_of(plan, ids, likes)
    key, order = map(plan.vector, likes[5:])
    (T, V, D, R), (need_a, need_b, need_m, need_c) = call[-4:], needs
    dA, dB, dm, dc = plan.wanted()
    for_m, for_y = need_m or need_c, need_b or need_m or need_c
    if not (need_a or for_y):
        return
    given: dict[str, Any] = ready(plan, call, True)
    del given["g"]
    strips, rows = cdiv(D, TILE["BLOCK_D"]), TILE["BLOCK_T"]
    while cdiv(T, 2 * rows) * strips >= 3 * plan.device.num_sms and rows < 4096:
        rows *= 2
    parts, block_r = cdiv(T, rows), {"BLOCK_R": power_of_two(R)}
    partial_A = plan.temp((strips, T, R)) if need_a else None
    partial_Y = plan.temp((parts, D, R)) if for_y else None
    sums = {"partial_Y": partial_Y, "partial_m": plan.temp((parts, D)) if for_m else None}
    given |= {"dy": dy, "partial_A": partial_A, "padding": padding, "ROWS": rows}
    plan.launch(embedding_bwd_kernel, (strips, parts), given | sums, call, TILE, block_r, num_stages=2)
    if for_y:
        given = sums | {"dB": dB, "dm": dm, "dc": dc, "parts": parts, "BLOCK_D": FINISH_D}
        plan.launch(embedding_finish_kernel, "D", given, call, block_r)
    if dA is not None:
        _by_number(plan, partial_A, key, order, dA, {"V": V, "padding": padding, "COMPACT": sparse})
    plan.path = "one pass over dy and the rows of W; sums of each number in the order of its tokens"


def _by_number(plan: Builder, partial_A: Any, key: Array, order: Array, dA: Array, into: dict[str, Any]) -> None:
    """The sums over the tokens of each number, in their order."""
    strips, T, R = partial_A.shape
    of = {"key": key, "sums": plan.temp((T, R)), "T": T, "R": R}
    tile = {"BLOCK_T": SEGMENT, "BLOCK_R": power_of_two(R), "BLOCK_C": CARRIES}
    plan.launch(segment_scan_kernel, "T", of | {"partial_A": partial_A, "order": order, "parts": strips}, tile)
    plan.zero(dA)
    stride = (R, 1) if into["COMPACT"] else (1, into["V"])
    plan.launch(segment_total_kernel, "T", of | into | {"out": dA, **named("stride_ov stride_or", stride)}, tile)
