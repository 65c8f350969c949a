"""The norms of layers that FSDP2 gathers together, by one call when the first of them runs.

Between two forwards their weights are shards, so no table of a whole model holds (_tree.py). But a unit's layers are there
together: whoever asks first has the norms of all computed, in three launches for some seven layers instead of three for each.

Gathered weights come to lie elsewhere now and then. A table of pointers is kept for each place where they lay (PLACES); norms
and fingerprints are of values, wherever those lie. A slice is handed out as in _tree.py: in the thread and the forward, or the
task of backward, that computed it, for the very tensors it was computed from, at their versions of then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._dispatch import forced
from fdora._norm_cache import NormCache
from fdora.functional._tree import Part, no_norms, tables
from fdora.integrations._table import Found

PLACES = 8


class Run(NamedTuple):
    moment: int
    norms: dict[int, tuple[tuple, Tensor]]  # by the id of a KeptNorm: what c was made from, and c


class Local(threading.local):
    run: Run | None = None


class Unit:
    """``find`` lists the layers of the unit that can be served now, while it is gathered."""

    def __init__(self, find: Callable[[], Found]):
        self.find = find
        self.local = Local()
        self.lock = threading.Lock()
        self.places: dict[tuple, Part] = {}
        self.cache: NormCache | None = None

    def forget(self) -> None:
        """Some W is another."""
        self.cache = None
        self.local = Local()

    def c_of(self, kept: Any, W: Tensor, A: Tensor, B: Tensor, s: float, moment: int) -> Tensor | None:
        """None where the layer has to look after itself. ``moment``: a number of the forward or of the task of backward."""
        run = self.local.run
        if run is None or run.moment != moment:
            run = self.local.run = self.compute(moment)
        made_from, c = run.norms.get(id(kept), (None, None))
        return c if made_from is not None and made_from == facts(W, A, B, s) else None

    def compute(self, moment: int) -> Run:
        nothing = Run(moment, {})
        with self.lock, torch.no_grad():
            found = [each for each in self.find() if each[0].shard is not None and isinstance(each[1], Tensor)]
            if len(found) < 2:
                return nothing
            kepts, W, A, B, s = map(list, zip(*found, strict=True))
            tensors: list[Tensor] = [*W, *A, *B]
            made_from = [(id(kept), kept.made_from(w), w.dtype, w.shape) for kept, w in zip(kepts, W, strict=True)]
            part = self.part_of(W, A, B, s, tensors)
            if part is None:
                return nothing
            if self.cache is None or made_from != self.cache.made_from:
                self.forget()
                self.cache = NormCache(no_norms(part))
            new = self.cache.current(W, made_from, partial(part.layers.guarded, W, A, B))
            each = zip(found, part.views(new.c), strict=True)
            return Run(moment, {id(kept): (facts(w, a, b, scale), c) for (kept, w, a, b, scale), c in each})

    def part_of(self, W: list, A: list, B: list, s: list, tensors: list[Tensor]) -> Part | None:
        """With the table of where these lie; None of layers on several devices, or of several dtypes."""
        key = (*[(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors], *s, forced())
        part = self.places.pop(key, None)
        if part is None:
            parts = tables(W, A, B, s)
            if len(parts) != 1:
                return None
            (part,) = parts
        self.places[key] = part  # the last one is the latest
        if len(self.places) > PLACES:
            del self.places[next(iter(self.places))]
        return part


def facts(W: Tensor, A: Tensor, B: Tensor, s: float) -> tuple:
    return W.data_ptr(), A.data_ptr(), B.data_ptr(), W._version, A._version, B._version, s


def units_of(groups: Sequence[Sequence[Any]], kepts: Sequence[Any], find: Callable[[Iterable[Any]], Found]) -> dict[int, Unit]:
    """By the id of a KeptNorm, for groups of the modules that FSDP2 gathers together."""
    by_base: dict[int, list[Any]] = {}
    for kept in kepts:
        base = None if kept.base is None else kept.base()
        if base is not None:
            by_base.setdefault(id(base), []).append(kept)
    units: dict[int, Unit] = {}
    for group in groups:
        mine = [kept for module in group for kept in by_base.get(id(module), ())]
        if len(mine) > 1:
            unit = Unit(partial(layers_of, [kept.layer for kept in mine], find))
            units |= {id(kept): unit for kept in mine}
    return units


def layers_of(layers: Sequence[Any], find: Callable[[Iterable[Any]], Found]) -> Found:
    return find([layer() for layer in layers if layer is not None])
