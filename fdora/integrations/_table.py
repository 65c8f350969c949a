"""The layers of a model whose norms one call computes: their tensors, and norms of before (_tree.py says when they hold)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._dispatch import forced
from fdora.functional._tree import Part, kept_norms, no_words, tables

Found = list[tuple[Any, Tensor, Tensor, Tensor, float]]  # KeptNorm, W, A, B, s
_captured: dict[int, tuple[Tensor, Tensor, Part]] = {}  # words, norms and tables of CUDA graphs, for good


class Run(NamedTuple):
    """The norms of one forward, or of one task of backward."""

    task: int  # -1 for a forward
    table: Table
    c: Sequence[Tensor]
    versions: list[int]
    captured: bool  # whether its kernels went into a CUDA graph


class Table:
    """The layers of a model, their tensors, and their norms of before, by part and stream."""

    def __init__(self, found: Found):
        kepts, W, A, B, s = map(list, zip(*found, strict=True))
        self.kepts = list(map(weakref.ref, kepts))
        tensors: list[Tensor] = [*W, *A, *B]
        self.count, self.s = len(W), s
        self.tensors = [weakref.ref(t) for t in tensors]
        self.pointers = list(map(Tensor.data_ptr, tensors))
        self.strides = list(map(Tensor.stride, tensors))
        self.shapes = [t.shape for t in tensors]
        self.forced = forced()  # fdora.backend may ask for another one by the next forward
        self.made_from = self.made_from_now(W)
        self.parts = tables(W, A, B, s)
        self.norms: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        with torch.inference_mode(False):  # else nobody outside of it could clear them
            self.graph = [_pair(part) for part in self.parts]

    def alive(self) -> list[Tensor] | None:
        """Its tensors, if they lie where they lay, are as large as they were, and the same backend computes."""
        tensors: Any = [ref() for ref in self.tensors]
        if any([t is None for t in tensors]) or self.forced != forced():
            return None
        moved = list(map(Tensor.data_ptr, tensors)) != self.pointers or [t.shape for t in tensors] != self.shapes
        return None if moved else tensors

    def has(self, i: int, W: Tensor, A: Tensor, B: Tensor, s: float, versions: list[int], compiled: bool) -> bool:
        """Whether these are the tensors of layer i. Compiled code, whose guards know them, may hand over other views."""
        if i >= self.count or self.s[i] != s:
            return False
        a, b = i + self.count, i + 2 * self.count
        refs, at, strides = self.tensors, self.pointers, self.strides
        if compiled:
            known = W.data_ptr() == at[i] and A.data_ptr() == at[a] and B.data_ptr() == at[b]
        else:
            known = refs[i]() is W and refs[a]() is A and refs[b]() is B
        same = known and versions[i] == W._version and versions[a] == A._version and versions[b] == B._version
        return same and strides[i] == W.stride() and strides[a] == A.stride() and strides[b] == B.stride()

    def traced(self) -> list[Tensor] | None:
        """The norms as ops of the graph that is traced."""
        tensors: Any = [ref() for ref in self.tensors]
        if any([t is None for t in tensors]):
            return None
        W, A, B = (tensors[i : i + self.count] for i in range(0, 3 * self.count, self.count))
        c: Any = [None] * self.count
        for part in self.parts:
            views = kept_norms(*(part.of(each) for each in (W, A, B, self.s)))
            for place, view in zip(part.places, views, strict=True):
                c[place] = view
        return c

    def made_from_now(self, W: list[Tensor]) -> list[Any]:
        """By which a change of some W in place is seen: of a DTensor's piece its own version says nothing."""
        kepts = [ref() for ref in self.kepts]
        return [None if kept is None else kept.made_from(w) for kept, w in zip(kepts, W, strict=True)]

    def forget(self) -> None:
        """Some W is another: all norms are computed again, also by graphs."""
        self.norms.clear()
        forget_captured()

    @torch.no_grad()
    def run(self, tensors: list[Tensor], task: int) -> Run:
        versions = [t._version for t in tensors]
        W, A, B = (tensors[i : i + self.count] for i in range(0, 3 * self.count, self.count))
        made_from = self.made_from_now(W)
        if made_from != self.made_from:
            self.forget()
            self.made_from = made_from
        c: Any = [None] * self.count
        for i, part in enumerate(self.parts):
            w, a, b = (part.of(each) for each in (W, A, B))
            if capturing(part.device):
                new, words = self.graph[i]
                part.layers.guarded(w, a, b, new, words, new, words)
                _captured[id(words)] = words, new, part
            else:
                key = (i, torch.cuda.current_stream(part.device).cuda_stream if part.device.type == "cuda" else 0)
                old, words = self.norms.pop(key) if key in self.norms else _pair(part)  # gone where a launch fails
                new = torch.empty_like(old)
                part.layers.guarded(w, a, b, old, words, new, words)
                self.norms[key] = new, words
            for place, view in zip(part.places, part.views(new), strict=True):
                c[place] = view
        return Run(task, self, c, versions, any([capturing(part.device) for part in self.parts]))


def forget_captured() -> None:
    """Graphs, of whatever model, compute all norms in their next replay."""
    for words, *_ in _captured.values():
        words.zero_()


def _pair(part: Part) -> tuple[Tensor, Tensor]:
    return torch.zeros(part.size, device=part.device, dtype=part.dtype), no_words(part)


def capturing(device: torch.device) -> bool:
    """Whether what runs there now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
