"""The norms that compiled code keeps of the few layers of one call, brought up to date by one launch: kernels/kept.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._norm_cache import MOST, seen_for_graphs
from fdora._torch import capturing, foreach_clone
from fdora.triton.kernels.kept import ALIGN, COUNTERS, kept_kernel
from fdora.triton.runtime import Builder, Like, Plan, cdiv, device_of, named
from fdora.triton.runtime.cost import Cost
from fdora.triton.runtime.walk import run
from fdora.triton.tree import Kept, all_anew, kept_of, made_from, norms_of_now, parts_of, shared
from fdora.triton.tree_table import FIELDS, Scales, Tensors

FEW = 4  # layers: as many copies as the kernel has arguments for
PROGRAMS = 1024  # of a launch, at most: more than are resident at once
LEAST = 16  # of a layer, which share A and B
ITEM = 64 * 1024  # elements of W in an item, as most have
HASH, ROOTS = 512, 1024  # words, and numbers of a copy, at a time


class State(NamedTuple):
    """The norms of some layers, what they were computed from, and the kernel's counters."""

    c: Tensor  # one behind the other
    words: Tensor  # (layers, n) int64: the fingerprint of each
    counters: Tensor  # int32, all 0 between launches but for whose turn it is


class KeptOfCall(Kept):
    """As for the layers of a model."""

    def __init__(self, W: Tensors, A: Tensors, B: Tensors, s: Scales):
        self.rows = [w.shape[0] for w in W]
        self.words = parts_for(len(W), max(cdiv(w.numel(), ITEM) for w in W))
        super().__init__(W, A, B, s)

    @torch.inference_mode(False)
    def nothing(self) -> State:
        c, words = super().nothing()
        return State(c, words, c.new_zeros(counters_of(self.layers.count, self.size), dtype=torch.int32))

    def of_call(self, W: Tensors, fresh: bool) -> Tensors:
        """c of each layer; ``fresh``: a copy, in which the caller may write."""
        copies: Tensors = ()

        def update(state: State, _: State) -> None:
            nonlocal copies
            copies = run(self.plan(fresh), (self.layers.table(W), state.words, state.counters, state.c))

        state = self.current(W, made_from(W), update, True)
        return copies if fresh else parts_of(state.c, W)

    def plan(self, fresh: bool) -> Plan:
        found, layers = self.layers.plans.get((fresh, self.size)), self.layers
        if found is None:
            shape = (self.rows, self.words, layers.partials, self.size, fresh)
            found = layers.plans[fresh, self.size] = plan_kept(device_of(layers.device), layers.launches, *shape, layers.work)
        return found


def in_one_launch(W: Tensors, A: Tensors, B: Tensors) -> bool:
    """Ragged tiles of split float32 factors leave no registers for the rest: it would spill."""
    each = zip(W, A, B, strict=True)
    return len(W) <= FEW and all(
        [a.element_size() == b.element_size() == 2 or w.shape[0] % 128 == w.shape[1] % 128 == 0 for w, a, b in each]
    )


def norms_of_call(W: Tensors, A: Tensors, B: Tensors, s: Scales, fresh: bool) -> Tensors:
    """As norms_of_now. ``fresh``: each is a tensor of its own, which nobody else has."""
    if in_one_launch(W, A, B):
        kept = kept_of(KeptOfCall, W, A, B, s)
        if kept is not None:
            found: Tensors = kept.of_call(W, fresh)
            return found
        views = parts_of(all_anew(W, A, B, s), W)
    else:
        views = parts_of(norms_of_now(W, A, B, s), W)
    return foreach_clone(list(views)) if fresh else views


def keep_for_graphs(W: Tensors, A: Tensors, B: Tensors, s: Scales, name: int) -> None:
    """What a graph needs is made when the layers of this name are seen for the first time: a capture would leave it empty."""
    if name in seen_for_graphs or capturing(W[0].device):
        return
    if W[0].device.type == "cuda":
        kept_of(KeptOfCall if in_one_launch(W, A, B) else Kept, W, A, B, s)
    if len(seen_for_graphs) >= MOST:
        seen_for_graphs.clear()  # what is not known is looked for again
    seen_for_graphs.add(name)


def counters_of(layers: int, size: int) -> int:
    return int(COUNTERS.value * layers + cdiv(size, ALIGN.value))


def parts_for(layers: int, items: int) -> int:
    """Programs, and words, of each layer: one for each item, where all is new."""
    return max(LEAST, min(items, PROGRAMS // layers))


def plan_kept(
    device: Any,
    launches: Sequence[tuple],
    rows: Sequence[int],
    words: int,
    partials: int,
    size: int,
    fresh: bool,
    work: Cost,
) -> Plan:
    """Of the table, and a State; ``fresh``: the results are copies of the norms, of layers of so many ``rows``."""
    plan, layers = Builder("norms kept of the layers of a call", device), len(rows)
    plan.path = "one launch, which compares and computes what changed"
    table = plan.matrix(Like((len(FIELDS), layers), (layers, 1), torch.int64, True))
    fingerprint = plan.matrix(Like((layers, words), (words, 1), torch.int64, True))
    counters = plan.vector(Like((counters_of(layers, size),), (1,), torch.int32, True))
    c = plan.vector(Like((size,), (1,), torch.float32, True))
    copies = [plan.result(f"c{i}", (N,), torch.float32) if fresh else None for i, N in enumerate(rows)]
    out = (*copies, *[None] * (FEW - layers))
    partial = plan.temp((partials,))
    given = {"table": table, "words": fingerprint, "counters": counters, "partial": partial, "c": c, "L": layers}
    given |= named("out0 out1 out2 out3", out) | {"parts": words, "HASH": HASH, "ROOTS": ROOTS}
    how: dict[str, Any] = {"pdl": plan.pdl, "cost": shared(work, launches)}
    for first, count, _, of, config in launches:
        plan.launch(kept_kernel, (count * words,), given | {"first": first, "OF": of}, config, **how)
    return plan.plan()
