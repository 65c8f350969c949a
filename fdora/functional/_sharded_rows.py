"""Norms of weights that all lie in even rows, as FSDP2 keeps a model: planned once, while they lie where they lay.

_sharded_tree.py asks each tensor for its layout in every call, which takes the host longer than the kernels run. Here the
layouts are a key, and what follows from them is kept: which rows of A are gathered together, and the table of pointers that the
kernels read. A call is one all-gather of all A (of MOST bytes at a time), the kernels, and one all-gather of all c.

A plan holds no tensor of a caller and no memory of size: what is gathered is allocated in each call. Where the allocator gives
other memory than the last time, the table is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fdora._dispatch import Backend, forced
from fdora._records import Norms
from fdora._torch import PLAIN, piece_of
from fdora.autograd._ops import OPS
from fdora.functional._sharded_tree import of_all
from fdora.functional._tree import Leaves, check_leaves, parts_of
from fdora.functional.backend import select_backend

MOST = 1 << 27  # bytes of whole A at a time: no more than a few layers' weights, and few collectives
PLANS = 4  # models
_plans: list[tuple[list, RowsPlan]] = []  # the last one first
_lock = Lock()


class RowsPlan:
    def __init__(self, leaves: Leaves, backend: Backend, dim: int):
        _, W, A, _, self.scales = leaves
        mesh = W[0].device_mesh
        self.mesh = mesh  # by whose id the plan is found
        self.group, self.count = mesh.get_group(dim), mesh.size(dim)
        self.shapes = [tuple(t.shape) for t in A]
        self.sizes = [t.numel() // self.count for t in A]  # of one process
        (self.part,) = parts_of([piece_of(t) for t in W])
        self.backend = select_backend(self.part.device, W[0].dtype, backend=backend).name
        self.runs: list[Run] = []
        first, held = 0, 0
        for i, t in enumerate(A):
            if held and held + t.nbytes > MOST:
                self.runs.append(Run(first, i))
                first, held = i, 0
            held += t.nbytes
        self.runs.append(Run(first, len(A)))

    @torch.no_grad()
    def norms(self, W: list, A: list, B: list, state: Any) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """All c; those of these rows in one buffer; and the fingerprint, of no use where there is no state."""
        pieces: Any = [list(map(piece_of, each)) for each in (W, A, B)]
        W, A, B = pieces
        part = self.part
        c = (torch.empty if part.full else torch.zeros)(part.size, device=part.device, dtype=part.dtype)
        words = c if state is None else torch.empty_like(state.fingerprint[0])
        for run in self.runs:
            at = slice(run.first, run.last)
            w, a, b = W[at], self.gather(A[at], run), B[at]
            layers = run.layers_of(w, a, b, self)
            if state is None:
                layers.norms(w, a, b, c)
            else:
                old = Norms(state.buffers[0].contiguous(), state.fingerprint[0][at].contiguous())
                layers.guarded(w, a, b, old, Norms(c, words[at]))
        return self.spread(c), c, words

    def gather(self, A: list[Tensor], run: Run) -> list[Tensor]:
        """Each (r, K)."""
        sizes, shapes = self.sizes[run.first : run.last], self.shapes[run.first : run.last]
        whole = of_all(torch.cat([t.reshape(-1) for t in A]), sizes, self.count, self.group)
        return [t.view(shape) for t, shape in zip(whole, shapes, strict=True)]

    def spread(self, c: Tensor) -> Sequence[Tensor]:
        """The whole norms of all weights, from those of each process's rows."""
        whole = of_all(c, self.part.lengths, self.count, self.group)
        return whole if self.part.full else [whole[i] for i in self.part.kept]


class Run:
    """Weights whose A are gathered together, and what the kernels know of them."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.at, self.layers = -1, None

    def layers_of(self, W: list[Tensor], A: list[Tensor], B: list[Tensor], plan: RowsPlan) -> Any:
        if self.layers is None or self.at != A[0].data_ptr():
            s, at = plan.scales[self.first : self.last], plan.part.at[self.first : self.last]
            self.layers, self.at = OPS[plan.backend].TreeLayers(W, A, B, s, at), A[0].data_ptr()
        return self.layers


def even_rows(W: list, A: list, B: list) -> int | None:
    """The one mesh dimension over which all are cut in even rows; None of anything else. The same in every process."""
    first = W[0]
    mesh, lies = first.device_mesh, first.placements
    dims = [i for i, p in enumerate(lies) if not p.is_replicate()]
    if len(dims) != 1 or lies[dims[0]] != Shard(0):
        return None
    count = mesh.size(dims[0])
    for tensors in (W, A, B):
        dtype, device = tensors[0].dtype, tensors[0].device
        for t in tensors:
            if t.device_mesh is not mesh or t.placements != lies or type(piece_of(t)) not in PLAIN:
                return None
            if t.dim() != 2 or t.shape[0] % count or t.dtype != dtype or t.device != device or not t.numel():
                return None
    return dims[0]


def plan_of(fn: str, leaves: Leaves, backend: Backend) -> RowsPlan | None:
    """Found by where the tensors lie and how; made, and arguments checked, where that is another. None: not such rows."""
    spec, W, A, B, scales = leaves
    tensors = [*W, *A, *B]
    if not all([isinstance(t, DTensor) for t in tensors]) or (torch.is_grad_enabled() and any([w.requires_grad for w in W])):
        return None
    pieces: Any = list(map(piece_of, tensors))
    key: list = [backend, forced(), list(map(Tensor.data_ptr, pieces)), list(map(type, scales)), scales]
    key += [[t.stride() for t in pieces], [t.shape for t in tensors], [t.dtype for t in pieces]]
    key += [[id(t.device_mesh) for t in tensors], [t.placements for t in tensors]]
    for each, plan in _plans:
        if each == key:
            return plan
    dim = even_rows(W, A, B)
    if dim is None:
        return None
    n = len(W)
    whole = [a.new_empty(1).expand(t.shape) for a, t in zip(pieces[n : 2 * n], A, strict=True)]
    check_leaves(fn, Leaves(spec, pieces[:n], whole, pieces[2 * n :], scales))
    plan = RowsPlan(leaves, backend, dim)
    with _lock:
        _plans[:] = [(key, plan), *_plans[: PLANS - 1]]
    return plan
