"""Norms of all weights of a model that several processes hold together: few collectives, however many weights there are.

A of every weight is gathered along its rows in one all-gather for each mesh dimension, dtype and device; the norms of what is
here are one call; squares of cut rows are added up in one all-reduce; and c is gathered, where it is asked for, as A was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from fdora._check import fail
from fdora._dispatch import Backend, forced
from fdora._records import Norms
from fdora._torch import PLAIN, all_gathered, piece_of
from fdora.autograd._ops import OPS
from fdora.autograd.norm import root_of_sum
from fdora.functional._layout import (
    Layout,
    is_cut,
    is_strided,
    layer_layout,
    local,
    mesh_of,
    part,
    placements,
    summed,
    sums_over,
    whole,
)
from fdora.functional._tree import Leaf, Leaves, check_leaves, parts_of
from fdora.functional.backend import select_backend


class Cut(NamedTuple):
    """Rows that are spread over one mesh dimension, by torch.chunk."""

    mesh: Any
    dim: int
    rows: int
    """Of all processes of this dimension."""


def cuts(t: Any) -> list[Cut]:
    """How the rows of a tensor were cut, one mesh dimension after the other: FSDP cuts last what others had cut."""
    if not isinstance(t, DTensor):
        return []
    mesh, rows, found = t.device_mesh, t.shape[0], []
    dims = [i for i, p in enumerate(t.placements) if is_cut(p, (0,))]
    for i in sorted(dims, key=lambda i: is_strided(t.placements[i])):
        found.append(Cut(mesh, i, rows))
        chunk = -(-rows // mesh.size(i))
        at: Any = mesh.get_coordinate()
        rows = max(0, min(chunk, rows - chunk * at[i]))
    return found


def gathered(parts: Sequence[Tensor], found: Sequence[list[Cut]]) -> list[Tensor]:
    """Each with all its rows, new where anything was cut. All processes of a mesh call with tensors that are cut alike."""
    parts, found = list(parts), [list(each) for each in found]
    while any(found):
        together: dict[tuple, list[int]] = {}
        for i, each in enumerate(found):
            if each:
                together.setdefault((each[-1].mesh, each[-1].dim, parts[i].dtype, parts[i].device), []).append(i)
        for places in together.values():
            last = [found[i].pop() for i in places]
            for i, t in zip(places, _one_gather([parts[i] for i in places], last), strict=True):
                parts[i] = t
    return parts


def _one_gather(parts: list[Tensor], found: list[Cut]) -> list[Tensor]:
    """Padded to the first process's rows, which are the most; behind each other; and apart again in one copy."""
    mesh, dim, _ = found[0]
    count = mesh.size(dim)
    flat = [_padded(t, cut, count) for t, cut in zip(parts, found, strict=True)]
    made = of_all(torch.cat(flat), [v.numel() for v in flat], count, mesh.get_group(dim))
    return [v.view(-1, *t.shape[1:])[: cut.rows] for v, t, cut in zip(made, parts, found, strict=True)]


def of_all(mine: Tensor, sizes: list[int], count: int, group: Any) -> Sequence[Tensor]:
    """Parts of these sizes, which lie one behind the other, each with those of all processes."""
    gathered = all_gathered(mine, count, group)
    whole = torch.empty_like(gathered).split_with_sizes([count * n for n in sizes])
    torch.split_with_sizes_copy(gathered.view(count, -1), sizes, 1, out=[t.view(count, -1) for t in whole])
    return whole


def _padded(t: Tensor, cut: Cut, count: int) -> Tensor:
    missing = -(-cut.rows // count) - t.shape[0]
    return pad(t.flatten(), (0, missing * (t.shape[1] if t.dim() > 1 else 1))) if missing else t.flatten()


@torch.no_grad()
def norms(call: Callable, fn: str, leaves: Leaves, state: Any, gather: bool | str, backend: Any) -> Any:
    """What dora_norm_tree, which is ``call``, returns for leaves with DTensors among them."""
    layouts, (spec, W, A, B, scales) = parts_of_tree(fn, leaves)
    here, pairs, each = (optree.tree_unflatten(spec, t) for t in (W, zip(A, B, strict=True), scales))
    found = call(here, pairs, s=each, state=state, backend=backend)
    c = spec.flatten_up_to(found if state is None else found.c)
    result = optree.tree_unflatten(spec, finished(fn, layouts, leaves.W, c, gather))
    return result if state is None else found._replace(c=result)


def parts_of_tree(fn: str, leaves: Leaves) -> tuple[list[Layout | None], Leaves]:
    """How each leaf lies, None of one that is no DTensor; and what it is on this process."""
    spec, W, A, B, scales = leaves
    layouts: list[Layout | None] = []
    ws, bs = [], []
    rows: list[Any] = list(A)
    spread: list[list[Cut]] = [[] for _ in rows]
    for i, (w, a, b) in enumerate(zip(W, A, B, strict=True)):
        with Leaf(spec, i):
            mesh = mesh_of(fn, {"W": w, "A": a, "B": b})
            lay = None if mesh is None else layer_layout(fn, mesh, w)
            layouts.append(lay)
            ws.append(part(w))
            bs.append(b if lay is None else local(fn, lay, "B", b.detach(), True))
            if lay is None:
                continue
            if isinstance(a, DTensor) and _without_rows(a) == placements(lay, "A", 2):
                rows[i], spread[i] = part(a.detach()), cuts(a)
            else:
                rows[i] = local(fn, lay, "A", a.detach(), True)
    return layouts, Leaves(spec, ws, gathered(rows, spread), bs, scales)


def _without_rows(t: Any) -> tuple[Any, ...]:
    """Its placements once its rows are gathered."""
    return tuple([Replicate() if is_cut(p, (0,)) else p for p in t.placements])


def finished(fn: str, layouts: Sequence[Layout | None], W: Sequence[Any], c: Sequence[Tensor], gather: bool | str) -> list[Any]:
    """c of each leaf: squares of cut rows added up; then gathered over all of the mesh, one dimension of it, or nothing."""
    c = list(c)
    over: dict[tuple, list[int]] = {}
    for i, lay in enumerate(layouts):
        if lay is not None and sums_over(lay):
            over.setdefault((sums_over(lay), c[i].dtype, c[i].device), []).append(i)
    for (groups, *_), places in over.items():
        total = root_of_sum(torch.cat([c[i] for i in places]).square(), groups)
        for i, each in zip(places, total.split([c[i].numel() for i in places]), strict=True):
            c[i] = each
    spread = [cuts(w) if lay is not None else [] for w, lay in zip(W, layouts, strict=True)]
    names: list[tuple[int, ...]] = []
    for lay, each in zip(layouts, spread, strict=True):
        names.append(() if lay is None else _gathered_names(fn, lay, each, gather))
    c = gathered(c, [[cut for cut in each if cut.dim in done] for each, done in zip(spread, names, strict=True)])
    return [
        t if lay is None else _result(t, lay, w.shape[:1], done) for t, lay, w, done in zip(c, layouts, W, names, strict=True)
    ]


def _gathered_names(fn: str, lay: Layout, spread: list[Cut], gather: bool | str) -> tuple[int, ...]:
    """The mesh dimensions that are no longer one of the result."""
    if isinstance(gather, bool):
        return tuple(range(lay.mesh.ndim)) if gather else ()
    known = tuple(lay.mesh.mesh_dim_names or ())
    if gather not in known:
        raise fail(fn, "gather", f"True, False or one of {known}", repr(gather), "Name the dimension that FSDP cuts over.")
    i = known.index(gather)
    if i in [cut.dim for cut in spread[:-1]]:
        raise fail(fn, "gather", "a dimension that cut last", repr(gather), "Gather over all of them, with True.")
    return (i,)


def _result(t: Tensor, lay: Layout, shape: Any, done: Sequence[int]) -> Any:
    """c as a DTensor over what is left of the mesh; plain where nothing is."""
    left = [i for i in range(lay.mesh.ndim) if i not in done]
    lies = summed(placements(lay, "c", 1))
    if not left:
        return t
    names = lay.mesh.mesh_dim_names
    mesh = lay.mesh if not done else lay.mesh[tuple(names[i] for i in left)]
    return whole(t, mesh, [lies[i] for i in left], shape)


MOST = 1 << 27  # bytes of whole A at a time: no more than a few layers' weights, and few collectives
PLANS = 4  # models
_plans: list[tuple[list, RowsPlan]] = []  # the last one first
_lock = Lock()


class RowsPlan:
    """Of weights that all lie in even rows, as FSDP2 keeps a model: planned once, while they lie where they lay.

    :func:`norms` asks each tensor for its layout in every call, which takes the host longer than the kernels run. Here the
    layouts are a key, and what follows from them is kept: which rows of A are gathered together, and the table of pointers that
    the kernels read. A call is one all-gather of all A (of MOST bytes at a time), the kernels, and one all-gather of all c.

    A plan holds no tensor of a caller and no memory of size: what is gathered is allocated in each call. Where the allocator
    gives other memory than the last time, the table is written again.
    """

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
