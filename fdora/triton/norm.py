"""Row norms on tensor cores: ``c = ||W + s B A||`` in one pass over W, nothing of size (N, K) written.

A program owns one tile of W. It multiplies the slabs of B and A that belong there, adds the tile, squares, and writes one
partial sum per row; a second kernel adds the partials of a row in a fixed order, so two runs agree bit for bit.

Roof at 8192 x 8192, r = 384 in bf16 on an H100: 51.5 GFLOP of products (67 us) beside 134 MB of W (45 us). The tile of W
is loaded before the products, so its latency hides behind them.

float32 factors run as float16 ones of three times the rank (split.py). Above r = 64 TMA fetches the tiles where it can.

With a norm of before and the fingerprint it belongs to, each program compares that with the fingerprint of now and has
nothing to do where they agree; a few programs share the tiles then, so that doing nothing takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fdora._records import WIDTH, NormOf
from fdora._torch import capturing, needs_dispatcher
from fdora.triton.configs import MAX_N, MIN_K, NormConfig, norm_config
from fdora.triton.copy import in_dtype
from fdora.triton.hash import WORDS, fingerprint
from fdora.triton.kernels.norm import choose_kernel, norm_kernel
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar, Tile
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.split import rows_at_a_time, split_A, split_B
from fdora.triton.sums import SUM_N, SUM_T, column_sums
from fdora.triton.tree import keep_for_graphs, norms_of_now, parts_of, room, seen_for_graphs, unplanned

Tensors = Sequence[Tensor]
GROUP_N = 8  # rows of tiles that run together, so that their slabs of A and B meet in L2


def norm_fwd(of: NormOf) -> Tensor:
    """c (N,) float32. W is read once whether its squared norm is known or not."""
    return (row_norm if needs_dispatcher(of.W) else _row_norm)(*of[:4], of.max_bytes, False)


def sqnorm_fwd(of: NormOf) -> Tensor:
    """c^2 (N,), to be added to that of other columns."""
    return (row_norm if needs_dispatcher(of.W) else _row_norm)(*of[:4], of.max_bytes, True)


def norm_guarded(of: NormOf, c: Tensor, old_hash: Tensor) -> tuple[Tensor, Tensor]:
    """c and the fingerprint of A, B, s. The c given is returned where the fingerprint given is theirs."""
    guarded = row_norm_guarded if needs_dispatcher(of.W) else _row_norm_guarded
    c, new_hash = guarded(*of[:4], of.max_bytes, c, old_hash)
    return c, new_hash


def norms_of_kept(layers: Sequence[tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor]]) -> Sequence[Tensor]:
    """Of each (W, A, B, s, c, old_hash) a copy of c, after c and old_hash were brought up to date."""
    W, *rest = (list(each) for each in zip(*layers, strict=True))
    whole = (row_norms_kept if needs_dispatcher(W[0]) else _row_norms_kept)(W, *rest)
    return parts_of(whole, W)


def _row_norm(W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, squared: bool) -> Tensor:
    return run(*_planned(W, A, B, s, max_bytes, squared))[0]


def _planned(W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, squared: bool) -> tuple[Plan, tuple, tuple]:
    tensors = (W, A, B)
    return plan_for(plan_norm, tensors, max_bytes, squared), tensors, (s,)


def _row_norm_guarded(
    W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, c: Tensor, old_hash: Tensor
) -> list[Tensor]:
    return list(run(*_guarded(W, A, B, s, max_bytes, c, old_hash)))


def _guarded(
    W: Tensor, A: Tensor, B: Tensor, s: float, max_bytes: int | None, c: Tensor, old_hash: Tensor, in_place: bool = False
) -> tuple[Plan, tuple, tuple]:
    tensors = (W, A, B, c, old_hash)
    return plan_for(plan_guarded_norm, tensors, max_bytes, in_place), tensors, (s,)


def _kept(W: Tensor, A: Tensor, B: Tensor, s: float, c: Tensor, seen: Tensor) -> tuple[Plan, tuple, tuple]:
    return _guarded(W, A, B, s, None, c, seen, True)


class Guard(NamedTuple):
    """A norm of before, the fingerprint it belongs to, and that of now."""

    c: Array
    old_hash: Array
    new_hash: Array
    in_place: bool  # the norm of now takes the place of c

    @property
    def hashes(self) -> tuple[Array, Array]:
        return self.old_hash, self.new_hash


def plan_norm(likes: Sequence[Like | None], device: Device, max_bytes: int | None, squared: bool) -> Plan:
    plan = Builder("dora_norm", device)
    W, A, B = map(plan.matrix, likes)
    s, c = plan.scalar("s"), plan.result("c", (W.shape[0],), torch.float32)
    norm(plan, W, A, B, s, c, max_bytes, squared)
    return plan.plan()


def plan_guarded_norm(likes: Sequence[Like | None], device: Device, max_bytes: int | None, in_place: bool) -> Plan:
    plan = Builder("dora_norm where A, B or s changed", device)
    W, A, B = map(plan.matrix, likes[:3])
    before, old_hash = plan.vector(likes[3]), plan.vector(likes[4])
    s, c = plan.scalar("s"), plan.result("c", (W.shape[0],), torch.float32)
    new_hash = plan.result("fingerprint", (WORDS,), torch.int64)
    fingerprint(plan, A, B, s, new_hash)
    norm(plan, W, A, B, s, c, max_bytes, False, Guard(before, old_hash, new_hash, in_place))
    return plan.plan()


def norm(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    s: Scalar,
    c: Array,
    max_bytes: int | None,
    squared: bool,
    guard: Guard | None = None,
) -> None:
    """max_bytes bounds the partials and the split factors: fewer rows at a time where they would not fit."""
    (N, K), R = W.shape, A.shape[0]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = in_dtype(plan, A, torch.float32), in_dtype(plan, B, torch.float32)
    row_bytes = 4 * max(1, cdiv(K, MIN_K))
    rows = 0 if A.itemsize == 2 else rows_at_a_time(N, K, R, max_bytes, row_bytes)
    split = rows > 0
    if not split:
        rows = N if max_bytes is None else max(MAX_N, max_bytes // row_bytes)
    plan.path = "one pass over W, nothing of its size written"
    if split:
        plan.path += "; float32 factors as float16 ones of three times the rank"
    if guard is not None:
        plan.path += "; the kernels return at once where A, B and s are what they were"
    hashes = None if guard is None else guard.hashes
    a, by_k = split_A(plan, A, hashes) if split else (A, None)
    for i in range(0, N, max(1, rows)):
        part = None if guard is None else guard._replace(c=guard.c.rows(i, i + rows))
        b, by_n = split_B(plan, B.rows(i, i + rows), hashes) if split else (B.rows(i, i + rows), None)
        _norm_of_rows(plan, W.rows(i, i + rows), a, b, by_n, by_k, c.rows(i, i + rows), s, squared, part)


def _norm_of_rows(
    plan: Builder,
    W: Array,
    A: Array,
    B: Array,
    by_n: Array | None,
    by_k: Array | None,
    c: Array,
    s: Scalar,
    squared: bool,
    guard: Guard | None,
) -> None:
    (N, K), R, half = W.shape, A.shape[0], W.itemsize == 2
    aligned = half and all(is_tma_compatible(t) for t in (W, A, B))
    config = norm_config(R, A.itemsize == 2, plan.device.capability, aligned, half)
    block_n, block_k, block_r, precision, num_warps, num_stages, tma = config
    tiles = cdiv(K, block_k)
    partial = plan.temp((tiles, N), torch.float32)
    programs = cdiv(N, block_n) * tiles
    old_hash, new_hash = (None, None) if guard is None else guard.hashes
    # Each of the three kernels of a guarded call is resident before the one ahead of it ends: 2 us less where nothing changed.
    pdl = guard is not None and plan.device.supports_pdl
    if guard is not None or tma:
        programs = min(programs, (1 if tma else 2) * plan.device.num_sms)
    tensors, strides, even = tiled(config, W, A, B)
    plan.launch(
        norm_kernel,
        (programs,),
        (*tensors, by_n, by_k, partial, old_hash, new_hash, s, N, K, R, *strides),
        (block_n, block_k, block_r, GROUP_N, even, precision, tma, by_n is not None, guard is not None, WORDS, pdl),
        num_warps,
        num_stages,
        pdl,
    )
    if guard is None:
        column_sums(plan, partial, c, sqrt=not squared)
    else:
        chosen(plan, partial, c, guard)


def chosen(plan: Builder, partial: Array, c: Array, guard: Guard) -> None:
    """The root of the sums of partials, or the norm of before, into c."""
    (tiles, N), pdl = partial.shape, plan.device.supports_pdl
    before, old_hash, new_hash, in_place = guard
    plan.launch(
        choose_kernel,
        (cdiv(N, SUM_N),),
        (partial, before, old_hash, new_hash, c, N, tiles),
        (in_place, WORDS, SUM_N, SUM_T, pdl),
        4,
        3,
        pdl,
    )


def tiled(config: NormConfig, W: Array, A: Array, B: Array) -> tuple[tuple, tuple, int]:
    """W, A and B as a kernel takes them, their strides, and what of its tiles is whole: EVEN of kernels/tile.py."""
    n, k, r = config[:3]
    (N, K), R = W.shape, A.shape[0]
    even = 0 if N % n or K % k else 1 if R % r else 2
    if config.TMA:
        return (Tile(W, (n, k)), Tile(A, (r, k)), Tile(B, (n, r))), (None,) * 6, even
    return (W, A, B), (*W.stride, *A.stride, *B.stride), even


givers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Address of old_hash -> who may have c already, given(W, A, B, s), or None; knows which W that is, made_from(W), where c is
kept beside old_hash, room[1], and whether forget_norms is told of changes of W: then ``norms`` is not None."""

_made_from: dict[int, tuple[int, ...]] = {}  # address of old_hash -> the W that c is of


def give_norm(old_hash: Tensor, giver: Any) -> None:
    givers[old_hash.data_ptr()] = giver
    _made_from.pop(old_hash.data_ptr(), None)  # of what lay there before


def _row_norms_kept(W: Tensors, A: Tensors, B: Tensors, s: Sequence[float], c: Tensors, old_hash: Tensors) -> Tensor:
    """One behind the other as in a model's norms, where whoever asked may write."""
    found = []
    for i, seen in enumerate(old_hash):
        each, giver = (W[i], A[i], B[i], s[i]), givers.get(seen.data_ptr())
        one = None if giver is None else giver.given(*each)
        one = _row_norm_kept(giver, *each, c[i], seen) if one is None else one
        found += [one, one.new_zeros(room(one) - one.shape[0])]
    return torch.cat(found)


def norms_now(operands: Sequence[Any], s: Sequence[float], old_hash: Tensors) -> list[Tensor]:
    """Of layers one behind the other (fdora/_records.py), for an op that reads them at once: they may be another's memory."""
    found: list[Tensor] = []
    for i, seen in enumerate(old_hash):
        giver = givers.get(seen.data_ptr())
        c = None if giver is None else giver.given(*operands[WIDTH * i : WIDTH * i + 3], s[i])
        if c is None:
            break
        found.append(c)
    if len(found) == len(s) and old_hash[0].data_ptr() in seen_for_graphs:
        return found
    W, A, B = (operands[i::WIDTH] for i in range(3))
    return _rest_of(found, W, A, B, s, old_hash)


def _rest_of(found: list[Tensor], W: Tensors, A: Tensors, B: Tensors, s: Sequence[float], old_hash: Tensors) -> list[Tensor]:
    """What nobody gave."""
    givers_of = [givers.get(seen.data_ptr()) for seen in old_hash]
    if all([giver is not None and giver.norms is not None for giver in givers_of]):  # who tell forget_norms
        if len(found) < len(s) and capturing(W[0].device):
            return list(parts_of(norms_of_now(W, A, B, s), W))
        keep_for_graphs(W, A, B, s, old_hash[0].data_ptr())
    for i in range(len(found), len(s)):
        each, giver = (W[i], A[i], B[i], s[i]), givers_of[i]
        c = None if giver is None else giver.given(*each)
        if c is None and giver is not None and giver.room is not None:
            c = _row_norm_kept(giver, *each, giver.room[1], old_hash[i])
        found.append(_row_norm(*each, None, False) if c is None else c)
    return found


def _row_norm_kept(giver: Any, W: Tensor, A: Tensor, B: Tensor, s: float, c: Tensor, old_hash: Tensor) -> Tensor:
    """Writes c and old_hash, and says so neither to the compiler nor to autograd's version counters.

    A checkpoint computes this again from the c and old_hash of its forward. Were the write declared, a second forward before
    that would make autograd refuse the backward. The write needs no order: whatever pair c and old_hash hold, also after a call
    was repeated or left out, the result is the norm of these W, A, B and s.
    """
    c, old_hash = c.data, old_hash.data
    default = (W.data_ptr(), 0 if W.is_inference() else W._version)
    made_from = default if giver is None else giver.made_from(W)
    if _made_from.setdefault(old_hash.data_ptr(), made_from) != made_from:  # what is new matches nothing as it is
        old_hash.zero_()
        _made_from[old_hash.data_ptr()] = made_from
    out, new_hash = run(*_kept(W, A, B, s, c, old_hash))
    old_hash.copy_(new_hash)
    return out


def _fake_row_norm(W, A, B, s, max_bytes, squared):
    return W.new_empty(W.shape[0], dtype=torch.float32)


def _fake_row_norm_guarded(W, A, B, s, max_bytes, c, old_hash):
    return [W.new_empty(W.shape[0], dtype=torch.float32), W.new_empty(WORDS, dtype=torch.int64)]


def _fake_row_norms_kept(W, A, B, s, c, old_hash):
    return W[0].new_empty(sum(map(room, W)), dtype=torch.float32)


row_norm = op("row_norm", _row_norm, _fake_row_norm, _planned)
row_norm_guarded = op("row_norm_guarded", _row_norm_guarded, _fake_row_norm_guarded, _guarded)
row_norms_kept = op(
    "row_norms_kept",
    _row_norms_kept,
    _fake_row_norms_kept,
    unplanned,
    "(Tensor[] W, Tensor[] A, Tensor[] B, float[] s, Tensor[] c, Tensor[] old_hash) -> Tensor",
    mapped=False,
)
