"""How the leaves of a tree meet a backend: in parts of one device and dtype, each with one buffer, planned once."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fdora._check import FdoraError, check_weights
from fdora._dispatch import Backend, forced
from fdora._records import Norms, acc_dtype
from fdora.autograd._ops import OPS
from fdora.autograd.norm import WORDS as WORDS_OF_ONE
from fdora.autograd.norm import tree_layers
from fdora.functional.backend import select_backend
from fdora.quant import QuantSpec, QuantWeight
from fdora.quant.codes8 import in_trees

WORDS = 16  # of a fingerprint, for each weight that is a tensor or 8-bit codes
ALIGN = 32  # numbers: each c begins at 128 bytes


class Leaves(NamedTuple):
    """The structure of the weights, and W, A, B and s of each leaf."""

    spec: Any
    W: list
    A: list
    B: list
    s: list


class Part:
    """The leaves of one device and dtype of c, other codes than 8-bit ones apart, and where each c begins in their buffer."""

    def __init__(self, device: torch.device, dtype: torch.dtype, coded: bool, places: list[int], W: Sequence[Any]):
        self.device, self.dtype, self.coded, self.places = device, dtype, coded, places
        self.words = WORDS_OF_ONE if coded else WORDS
        self.whole = len(places) == len(W)
        self.at: list[int] = []
        self.lengths: list[int] = []
        self.kept: list[int] = []  # which of the lengths are a c; others fill up
        self.size = 0
        self.layers: Any = None
        for i in places:
            N = W[i].shape[0]
            self.at.append(self.size)
            self.kept.append(len(self.lengths))
            self.lengths += [N] if N % ALIGN == 0 else [N, -N % ALIGN]
            self.size += N + -N % ALIGN
        self.full = len(self.lengths) == len(places)

    def of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return leaves if self.whole else [leaves[i] for i in self.places]

    def views(self, buffer: Tensor) -> Sequence[Tensor]:
        views = buffer.split_with_sizes(self.lengths)
        return views if len(views) == len(self.kept) else [views[i] for i in self.kept]

    @staticmethod
    def leaves(count: int, parts: Sequence[Part], buffers: Sequence[Tensor]) -> Sequence[Any]:
        """c of each of so many, out of the buffers of their parts."""
        found: list[Any] = [None] * count
        for part, buffer in zip(parts, buffers, strict=True):
            views = part.views(buffer)
            if part.whole:
                return views
            for i, c in zip(part.places, views, strict=True):
                found[i] = c
        return found


def parts_of(W: Sequence[Any]) -> list[Part]:
    found: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for i, w in enumerate(W):
        coded = isinstance(w, QuantWeight) and not in_trees(w)
        found.setdefault((w.device, acc_dtype(w.dtype), coded), []).append(i)
    return [Part(*key, places, W) for key, places in found.items()]


def tables(W: list, A: list, B: list, scales: list, backend: Backend = "auto") -> list[Part]:
    """The parts of such layers, with what the backend must know of them."""
    parts = parts_of(W)
    for part in parts:
        choice = select_backend(W[part.places[0]], backend=backend)
        w, a, b, s = (part.of(leaves) for leaves in (W, A, B, scales))
        part.layers = tree_layers(w, a, b, s, part.at, choice.name)
    return parts


_plans: list[tuple[list, list[Part]]] = []  # the last ones first
_lock = Lock()
MOST = 32  # a plan is a table of pointers and holds no tensor of a caller


def plan(fn: str, leaves: Leaves, backend: Backend) -> list[Part]:
    """The parts, whose arguments passed the checks; made once for tensors that lie where they lay and look as they looked."""
    _, W, A, B, scales = leaves
    coded: list[tuple[int, QuantSpec]] = []
    tensors = [*W, *A, *B]
    if QuantWeight in map(type, W):
        coded = [(i, w.spec) for i, w in enumerate(W) if isinstance(w, QuantWeight)]
        each = [t.tensors if isinstance(t, QuantWeight) else (t,) for t in tensors]
        tensors = [t for stored in each for t in stored if t is not None]
    pointers = list(map(Tensor.data_ptr, tensors))
    # Kinds before values: two lists are compared up to where they differ, and tensors among the values have no truth.
    key: list = [backend, forced(), pointers, list(map(type, scales)), scales, list(map(Tensor.stride, tensors))]
    key += [[t.shape for t in tensors], [t.dtype for t in tensors], coded, [W[i].device for i, _ in coded]]
    frozen = not (torch.is_grad_enabled() and any([w.requires_grad for w in W]))
    known = frozen and 0 not in pointers  # no address: meta tensors and empty ones, on whatever device
    if known:
        for each, parts in _plans:
            if each == key:
                return parts
    check_leaves(fn, leaves)
    parts = tables(W, A, B, scales, backend)
    if known:
        with _lock:
            _plans[:] = [(key, parts), *_plans[: MOST - 1]]
    return parts


def check_leaves(fn: str, leaves: Leaves) -> None:
    for i, (w, a, b, s) in enumerate(zip(*leaves[1:], strict=True)):
        with Leaf(leaves.spec, i):
            check_weights(fn, {"W": w, "A": a, "B": b}, s)


def kept_norms(W: Sequence[Any], A: Sequence[Any], B: Sequence[Any], scales: Sequence[Any]) -> Sequence[Tensor]:
    """c of each layer of one part, by kernels in compiled code."""
    kernels = OPS["triton"].norms_kept
    assert kernels is not None
    with torch.no_grad():
        views: Sequence[Tensor] = kernels(W, A, B, scales)
    return views


def no_words(part: Part) -> Tensor:
    """Which match nothing."""
    return torch.zeros((len(part.places), part.words), device=part.device, dtype=torch.int64)


@torch.inference_mode(False)  # else nobody outside of it could write there
def no_norms(part: Part) -> Norms:
    """With such words."""
    return Norms(torch.zeros(part.size, device=part.device, dtype=part.dtype), no_words(part))


def tree_of(spec: Any, parts: list[Part], buffers: Sequence[Tensor]) -> Any:
    return optree.tree_unflatten(spec, Part.leaves(spec.num_leaves, parts, buffers))


class Leaf:
    """An error inside names the leaf: its path behind the argument."""

    def __init__(self, spec: Any, i: int, fn: str = ""):
        self.spec, self.i, self.fn = spec, i, fn

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, FdoraError):
            start, found, rest = str(error).partition("` must ")
            if self.fn:
                start = f"fdora.{self.fn}: {start.partition(': ')[2]}"
            path = optree.treespec_accessors(self.spec)[self.i].codify("weights")
            raise FdoraError(f"{start}` of leaf {path} must {rest}" if found else str(error)) from None
