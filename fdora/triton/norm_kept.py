"""Norms that compiled code asks for when it runs: those that the hook of a model computed, or what each layer keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._norm_cache import givers, seen_for_graphs
from fdora._records import WIDTH
from fdora._torch import capturing, foreach_clone, needs_dispatcher
from fdora.triton.norm import plan_guarded_norm, plan_norm
from fdora.triton.op import Maker, empty, op
from fdora.triton.operands import any_norms, with_norms
from fdora.triton.runtime.plan import Plan
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.tree import parts_of, room, unplanned
from fdora.triton.tree_kept import keep_for_graphs, norms_of_call
from fdora.triton.tree_table import Scales, Tensors


def norms_of_kept(layers: Sequence[tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor]]) -> Tensors:
    """Of each (W, A, B, s, c, old_hash) a copy of c, after c and old_hash were brought up to date."""
    W, *rest = (list(each) for each in zip(*layers, strict=True))
    whole = (row_norms_kept if needs_dispatcher(W[0]) else _row_norms_kept)(W, *rest)
    return parts_of(whole, W)


def _giver_of(old_hash: Tensor) -> Any:
    """Not one whose own lies elsewhere by now: what it let go of may be anybody's."""
    known = old_hash.__dict__.get("giver")
    giver = None if known is None else known()
    if giver is not None and giver.room is not None and giver.room[2] is old_hash:
        return giver
    giver = givers.get(old_hash.data_ptr())
    if giver is None or giver.room is None or giver.room[2].data_ptr() != old_hash.data_ptr():
        return None
    return giver


def _row_norms_kept(W: Tensors, A: Tensors, B: Tensors, s: Scales, c: Tensors, old_hash: Tensors) -> Tensor:
    """One behind the other as in a model's norms, where whoever asked may write."""
    found = []
    for i, seen in enumerate(old_hash):
        each, giver = (W[i], A[i], B[i], s[i]), _giver_of(seen)
        one = None if giver is None else giver.given(*each)
        one = _row_norm_kept(giver, *each, c[i], seen) if one is None else one
        found += [one, one.new_zeros(room(one) - one.shape[0])]
    return torch.cat(found)


def norms_now(operands: Sequence[Any], s: Scales, old_hash: Tensors, fresh: bool = False) -> Tensors:
    """Of layers one behind the other (fdora/_records.py), for an op that reads them at once: they may be another's memory.

    ``fresh``: they are nobody else's, and none is a part of another.
    """
    found: list[Tensor] = []
    norms = run = None
    for i, seen in enumerate(old_hash):
        giver = _giver_of(seen)
        if giver is None:
            break
        each = (*operands[WIDTH * i : WIDTH * i + 3], s[i])
        if giver.norms is not norms:
            norms = giver.norms
            run = None if norms is None else norms.running(each[0].device)
        if run is not None and run.table.has(giver.place, *each, run):  # of one model, in its forward: nearly always
            norms.used = True
            found.append(run.c[giver.place])
            continue
        c = giver.given(*each)
        if c is None:
            break
        found.append(c)
    if fresh:
        found = foreach_clone(found)
    if len(found) == len(s) and old_hash[0].data_ptr() in seen_for_graphs:
        return found
    W, A, B = (operands[i::WIDTH] for i in range(3))
    return _rest_of(found, W, A, B, s, old_hash, fresh)


def asking(make: Maker, schema: str, divide: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """An op of (x, operands, s, ..., seen, keep) whose layers, where there is ``seen``, come without norms: it runs the plan of
    divide(x, operands, s, ...), which are tensors, options and scalars, with those of now. They come last in what it returns,
    one for each layer, if somebody keeps them."""

    def call(x: Tensor, operands: Sequence[Any], s: Any, *options: Any) -> tuple[Tensor, ...]:
        *how, seen, keep = options
        if seen:
            c = norms_now(operands, s, seen, keep)
            operands = with_norms(operands, c)
        tensors, options, scalars = divide(x, operands, s, *how)
        results = run(plan_for(make, tensors, *options), tensors, scalars)
        return (*results, *c) if seen and keep else results

    def counted(x: Tensor, operands: Sequence[Any], s: Any, *options: Any) -> tuple[Plan]:
        *how, seen, _ = options  # who counts flops has not asked
        tensors, options, _ = divide(x, with_norms(operands, any_norms(operands)) if seen else operands, s, *how)
        return (plan_for(make, tensors, *options),)

    def fake(x: Tensor, operands: Sequence[Any], s: Any, *options: Any) -> list[Tensor]:
        *how, _, keep = options
        tensors, options, _ = divide(x, operands, [1.0] * len(s), *how)  # s may be symbolic: nothing asks for it
        forms = [*make.forms(tensors, *options).values()]
        return empty(tensors, forms if keep else forms[: -len(s)])

    return op(schema, call, fake, counted), call


def _rest_of(found: list[Tensor], W: Tensors, A: Tensors, B: Tensors, s: Scales, old_hash: Tensors, fresh: bool) -> Tensors:
    """What nobody gave."""
    givers_of = [_giver_of(seen) for seen in old_hash]
    if all([giver is not None and giver.norms is not None for giver in givers_of]):  # who tell forget_norms
        if len(found) < len(s) and capturing(W[0].device):
            return norms_of_call(W, A, B, s, fresh)
        keep_for_graphs(W, A, B, s, old_hash[0].data_ptr())
    for i in range(len(found), len(s)):
        each, giver = (W[i], A[i], B[i], s[i]), givers_of[i]
        c = None if giver is None else giver.given(*each)
        if c is not None:
            c = c.clone() if fresh else c
        elif giver is not None and giver.room is not None:
            c = _row_norm_kept(giver, *each, giver.room[1], old_hash[i])
        found.append(run(plan_for(plan_norm, each[:3], None, False), each[:3], (s[i],))[0] if c is None else c)
    return found


def _row_norm_kept(giver: Any, W: Tensor, A: Tensor, B: Tensor, s: float, c: Tensor, old_hash: Tensor) -> Tensor:
    """Writes c and old_hash, and says so neither to the compiler nor to autograd's version counters.

    A checkpoint computes this again from the c and old_hash of its forward. Were the write declared, a second forward before
    that would make autograd refuse the backward. The write needs no order: whatever pair c and old_hash hold, also after a call
    was repeated or left out, the result is the norm of these W, A, B and s.
    """
    known = vars(old_hash if giver is None else giver.room[2])  # compiled code may hand over another view
    c, old_hash = c.data, old_hash.data
    default = (W.data_ptr(), 0 if W.is_inference() else W._version)
    made_from = default if giver is None else giver.made_from(W)
    if known.setdefault("made_from", made_from) != made_from:  # what is new matches nothing as it is
        old_hash.zero_()
        known["made_from"] = made_from
    tensors = (W, A, B, c, old_hash)
    out, new_hash = run(plan_for(plan_guarded_norm, tensors, None, True), tensors, (s,))
    old_hash.copy_(new_hash)
    return out


def _fake_row_norms_kept(W, A, B, s, c, old_hash):
    return W[0].new_empty(sum(map(room, W)), dtype=torch.float32)


row_norms_kept = op(
    "row_norms_kept(Tensor[] W, Tensor[] A, Tensor[] B, float[] s, Tensor[] c, Tensor[] old_hash) -> Tensor",
    _row_norms_kept,
    _fake_row_norms_kept,
    unplanned,
    mapped=False,
)
