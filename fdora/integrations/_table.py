"""Layers whose norms are computed together, and these norms: those of a model, see _tree.py, and of a unit of FSDP2."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora import _facts, _plain
from fdora._dispatch import forced
from fdora._norm_cache import NormCache
from fdora.functional._tree import Part, kept_norms, no_norms, tables
from fdora.quant import QuantWeight

Found = list[tuple[Any, Any, Tensor, Tensor, float]]  # KeptNorm, W, A, B, s; W may be a QuantWeight of 8-bit codes


class Run(NamedTuple):
    """The norms of one forward, or of one task of backward."""

    task: int  # -1 for a forward
    table: Table
    c: Sequence[Tensor]
    versions: tuple[int, ...]  # of all W, all A and all B
    of_scales: tuple[int, ...]  # the same
    captured: bool  # whether its kernels went into a CUDA graph


class Table:
    """The layers of a model, their tensors, and their norms of before, by part."""

    def __init__(self, found: Found):
        kepts, W, A, B, s = map(list, zip(*found, strict=True))
        self.kepts = list(map(weakref.ref, kepts))
        stored: list[tuple[Any, ...]] = [w.tensors if isinstance(w, QuantWeight) else (w,) for w in W]
        tensors: list[Tensor] = [*[codes for codes, *_ in stored], *A, *B]
        self.count, self.s = len(W), s
        self.tensors = tuple([weakref.ref(t) for t in tensors])
        coded = [i for i, each in enumerate(stored) if len(each) > 1]
        self.coded = {place: i for i, place in enumerate(coded)}  # layers whose W are codes
        self.scales = tuple([weakref.ref(stored[i][1]) for i in coded])
        self.pointers = list(map(Tensor.data_ptr, tensors))
        self.strides = list(map(Tensor.stride, tensors))
        self.forced = forced()  # fdora.backend may ask for another one by the next forward
        self.parts = tables(W, A, B, s)
        now = _facts.places(self.tensors + self.scales)  # after the kernels have brought their way to ask for them
        self.key = None if now is None else now[1]
        self.caches = [NormCache(no_norms(part)) for part in self.parts]

    def alive(self) -> tuple[tuple[Tensor, ...], tuple[int, ...]] | None:
        """Its tensors and scales, and their versions, if they lie where and as they lay, and the same backend computes."""
        now = _facts.places(self.tensors + self.scales)
        return None if now is None or now[1] != self.key or self.forced != forced() else (now[0], now[2])

    def has(self, i: int, W: Any, A: Tensor, B: Tensor, s: float, run: Run) -> bool:
        """Whether these are the tensors of layer i, as they were when the forward began."""
        if not 0 <= i < self.count or self.s[i] != s:
            return False
        if isinstance(W, QuantWeight):
            if not self.has_scales(i, W, run):
                return False
            W = W.tensors[0]
        return _plain.unchanged((W, A, B), self.tensors, run.versions, i)

    def has_scales(self, i: int, W: QuantWeight, run: Run) -> bool:
        """Whether those of these codes are layer i's, likewise."""
        return i in self.coded and _plain.unchanged(W.tensors[1:2], self.scales, run.of_scales, self.coded[i])

    def has_views(self, i: int, W: Any, A: Tensor, B: Tensor, s: float, versions: tuple[int, ...]) -> bool:
        """The same of compiled code, whose guards know the tensors: it may hand over other views of their memory."""
        if not 0 <= i < self.count or self.s[i] != s or isinstance(W, QuantWeight):
            return False
        at, strides, tensors = self.pointers[i :: self.count], self.strides[i :: self.count], (W, A, B)
        known = at == [t.data_ptr() for t in tensors] and strides == [t.stride() for t in tensors]
        return known and versions[i :: self.count] == tuple([t._version for t in tensors])

    def traced(self) -> list[Tensor] | None:
        """The norms as ops of the graph that is traced; None of codes, which do without."""
        tensors: Any = [ref() for ref in self.tensors]
        if any([t is None for i, t in enumerate(tensors) if i not in self.coded]):
            return None
        W, A, B = (tensors[i : i + self.count] for i in range(0, 3 * self.count, self.count))
        c: Any = [None] * self.count
        for part in self.parts:
            places = [place for place in part.places if place not in self.coded]
            views = kept_norms(*([each[place] for place in places] for each in (W, A, B, self.s))) if places else ()
            for place, view in zip(places, views, strict=True):
                c[place] = view
        return c

    def shards(self) -> list[Any]:
        """By which a change in place of a W that is a piece of a DTensor is seen: the version of the piece says nothing."""
        kepts = [ref() for ref in self.kepts]
        return [None if kept is None or kept.shard is None else kept.shard.state() for kept in kepts]

    def forget(self) -> None:
        for cache in self.caches:
            cache.forget()

    @torch.no_grad()
    def run(self, tensors: tuple[Tensor, ...], versions: tuple[int, ...], task: int) -> Run:
        n = self.count
        made_from = versions[:n], versions[3 * n :], self.shards()
        W, A, B = (tensors[i : i + n] for i in range(0, 3 * n, n))
        wholes, captured = [], False
        for part, cache in zip(self.parts, self.caches, strict=True):
            w, a, b = (part.of(each) for each in (W, A, B))
            norms = cache.current(w, made_from, partial(part.layers.guarded, w, a, b))
            wholes.append(norms.c)
            captured = captured or norms is cache.graph
        c = [*Part.leaves(n, self.parts, wholes)]  # a list, which C asks for (fdora/_plain.py)
        return Run(task, self, c, versions[: 3 * n], versions[3 * n :], captured)


PLACES = 8


class Local(threading.local):
    """``moment``: a number of the forward or of the task of backward in which the norms were computed."""

    def __init__(self) -> None:
        self.moment = -1
        self.norms: dict[int, tuple[tuple, Tensor]] = {}  # by the id of a KeptNorm: what c was made from, and c


class Unit:
    """The norms of layers that FSDP2 gathers together, by one call when the first of them runs. ``find`` lists who can be
    served now, while the unit is gathered.

    Between two forwards their weights are shards, so no table of a whole model holds (_tree.py). But a unit's layers are there
    together: whoever asks first has the norms of all computed, in three launches for some seven layers instead of three for
    each.

    Gathered weights come to lie elsewhere now and then. A table of pointers is kept for each place where they lay (PLACES);
    norms and fingerprints are of values, wherever those lie. A slice is handed out as in _tree.py: in the thread and the
    forward, or the task of backward, that computed it, for the very tensors it was computed from, at their versions of then.
    """

    def __init__(self, kepts: Sequence[Any], find: Callable[[Iterable[Any]], Found]):
        self.layers, self.find = [kept.layer for kept in kepts], find
        self.local = Local()
        self.lock = threading.Lock()
        self.places: dict[tuple, Part] = {}
        self.cache: NormCache | None = None

    def forget(self) -> None:
        """Some W is another."""
        self.cache = None
        self.local = Local()

    def c_of(self, kept: Any, W: Tensor, A: Tensor, B: Tensor, s: float, moment: int) -> Tensor | None:
        """None where the layer has to look after itself."""
        if self.local.moment != moment:
            norms = self.compute()  # which may begin anew
            self.local.norms, self.local.moment = norms, moment
        made_from, c = self.local.norms.get(id(kept), (None, None))
        return c if made_from is not None and made_from == facts(W, A, B, s) else None

    def compute(self) -> dict[int, tuple[tuple, Tensor]]:
        with self.lock, torch.no_grad():
            layers = [layer() for layer in self.layers if layer is not None]
            found = [each for each in self.find(layers) if each[0].shard is not None and isinstance(each[1], Tensor)]
            if len(found) < 2:
                return {}
            kepts, W, A, B, s = map(list, zip(*found, strict=True))
            made_from = [(id(kept), kept.made_from(w), w.dtype, w.shape) for kept, w in zip(kepts, W, strict=True)]
            part = self.part_of(W, A, B, s)
            if part is None:
                return {}
            if self.cache is None or made_from != self.cache.made_from:
                self.forget()
                self.cache = NormCache(no_norms(part))
            new = self.cache.current(W, made_from, partial(part.layers.guarded, W, A, B))
            each = zip(found, part.views(new.c), strict=True)
            return {id(kept): (facts(w, a, b, scale), c) for (kept, w, a, b, scale), c in each}

    def part_of(self, W: list, A: list, B: list, s: list) -> Part | None:
        """With the table of where these lie; None of layers on several devices, or of several dtypes."""
        key = (*[(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (*W, *A, *B)], *s, forced())
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
            unit = Unit(mine, find)
            units |= {id(kept): unit for kept in mine}
    return units
