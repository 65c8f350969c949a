"""How the arguments of one call lie on a mesh: one table, applied to each mesh dimension by itself.

    way    x      W     A     B     m, norm  bias   y      gradients
    col    R      S(0)  R     S(0)  S(0)     S(0)   S(-1)  of x and A partial, of others as the argument
    row    S(-1)  S(1)  S(1)  R     R        R      P      of B, m, norm partial; bias is added after the sum
    data   S(t)   R     R     R     R        R      S(t)   of A, B, m, norm, bias partial
    same   R      R     R     R     R        R      R      whole

R is replicated, S(i) cut along axis i, P a sum that is pending, t an axis of tokens. A plain tensor among DTensors counts as R,
and its gradient comes back whole. Imported only where a DTensor was given: `import fdora` loads nothing of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Size, Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fdora._check import FdoraError, fail
from fdora._torch import strided_shard

# What `type(p) is Shard` would ask, Dynamo (torch 2.11) answers wrongly of a placement that its graph made.
STRIDED = strided_shard()

# For each argument how it lies, and how its gradient does. L: cut along the last axis. N: as the rows of W. T: as x. A digit:
# cut along that axis. R: replicated, P: a pending sum; what is not named is RR.
LAYER = {
    "col": {"x": "RP", "A": "RP", "B": "NN", "m": "NN", "norm": "NN", "bias": "NN", "y": "L", "c": "NN"},
    "row": {"x": "LL", "A": "LL", "B": "RP", "m": "RP", "norm": "RP", "y": "P", "c": "PP"},
    "data": {"x": "TT", "A": "RP", "B": "RP", "m": "RP", "norm": "RP", "bias": "RP", "y": "T"},
    "same": {},
}
# Of compose, where base decides; pending sums of base and lora stay pending.
COMPOSE = {
    "cols": {"base": "LL", "lora": "LL", "g": "00", "bias": "00", "y": "L"},
    "sum": {"base": "PR", "lora": "PR", "g": "RP", "y": "P"},
    "data": {"base": "TT", "lora": "TT", "g": "RP", "bias": "RP", "y": "T"},
    "same": {},
}
# Of a bank of adapters, whose parameters have one more axis in front.
BANK = {
    "col": {"x": "RP", "A": "RP", "B": "11", "m": "11", "norm": "11", "bias": "00", "y": "L"},
    "row": {"x": "LL", "A": "22", "B": "RP", "m": "RP", "norm": "RP", "y": "P"},
    "data": {"x": "TT", "A": "RP", "B": "RP", "m": "RP", "norm": "RP", "bias": "RP", "ids": "00", "y": "T"},
    "same": {},
}
# Of an embedding: the rows of its table are a vocabulary, and m and norm belong to columns, or to rows (norm_axis=1).
TABLE = {
    "vocabulary": {"A": "11", "B": "RP", "m": "RP", "norm": "RP", "y": "P"},
    "columns": {"A": "RP", "B": "00", "m": "00", "norm": "00", "y": "L"},
    "data": {"ids": "TT", "A": "RP", "B": "RP", "m": "RP", "norm": "RP", "y": "T"},
    "same": {},
}
TABLE_OF_ROWS = TABLE | {"vocabulary": TABLE["vocabulary"] | {"m": "00", "norm": "00"}}
# Of a convolution: by channels of its output, by channels of its input, by images.
CONV = {
    "col": {"x": "RP", "A": "RP", "B": "00", "m": "00", "norm": "00", "bias": "00", "y": "1"},
    "row": {"x": "11", "A": "11", "B": "RP", "m": "RP", "norm": "RP", "y": "P"},
    "data": {"x": "00", "A": "RP", "B": "RP", "m": "RP", "norm": "RP", "bias": "RP", "y": "0"},
    "same": {},
}


Placements = tuple[Any, ...]  # one for each mesh dimension


class Layout(NamedTuple):
    """Of one layer: what each mesh dimension does to it."""

    mesh: Any
    table: dict[str, dict[str, str]]
    ways: tuple[str, ...]
    rows: Placements
    """Placements of W."""
    tokens: Placements
    """Placements of x."""


def is_same(a: Any, b: Any) -> bool:
    """Whether two placements are equal, also where Dynamo (torch 2.8) compares objects; of strided shards their axes."""
    if a.is_replicate():
        return bool(b.is_replicate())
    if a.is_partial():
        return bool(b.is_partial()) and a.reduce_op == b.reduce_op
    return is_cut(b, (a.dim,))


def mesh_of(fn: str, tensors: dict[str, Any]) -> Any:
    """The one mesh of all DTensors."""
    mesh, first = None, ""
    for arg, t in tensors.items():
        if isinstance(t, DTensor):
            if mesh is None:
                mesh, first = t.device_mesh, arg
            elif t.device_mesh != mesh:
                remedy = "Distribute all over one mesh, and unshard what FSDP keeps in shards."
                raise fail(fn, arg, f"on {mesh} (the mesh of `{first}`)", t.device_mesh, remedy)
    return mesh


def placed(t: Any, mesh: Any) -> Placements:
    """Where a tensor lies: a plain one everywhere."""
    return tuple(t.placements) if isinstance(t, DTensor) else (Replicate(),) * mesh.ndim


def is_cut(p: Any, axes: Sequence[int]) -> bool:
    """Whether along one of these axes."""
    return not p.is_replicate() and not p.is_partial() and p.dim in axes


def is_strided(p: Any) -> bool:
    """Whether FSDP cut what tensor parallelism had cut before."""
    return isinstance(p, STRIDED)


def layer_layout(fn: str, mesh: Any, W: Any, x: Any = None) -> Layout:
    """What W and x decide. Without x: a function of the weight alone, whose rows may lie anywhere."""
    return layout(fn, mesh, LAYER, W, x, () if x is None else range(x.dim() - 1))


def layout(fn: str, mesh: Any, table: dict, W: Any, x: Any, axes: Sequence[int]) -> Layout:
    """The same for a table. ``axes`` are those of x that data is cut along."""
    rows = placed(W, mesh)
    tokens = () if x is None else placed(x, mesh)
    first, second, *_ = table
    ways = []
    for i, p in enumerate(rows):
        if p.is_replicate():
            ways.append("data" if x is not None and is_cut(tokens[i], axes) else "same")
            continue
        if p.is_partial() or p.dim > 1 or (is_strided(p) and (p.dim == 1 or x is not None)):
            remedy = "Unshard what FSDP keeps in shards first." if is_strided(p) else "Redistribute it."
            raise fail(fn, "W", f"Replicate, Shard(0) or Shard(1) {where(mesh, i)}", p, remedy)
        ways.append(first if p.dim == 0 else second)
    return Layout(mesh, table, tuple(ways), rows, tokens)


def compose_layout(fn: str, mesh: Any, base: Any) -> Layout:
    ways, tokens = [], placed(base, mesh)
    for i, p in enumerate(tokens):
        if is_strided(p):
            raise fail(fn, "base", f"Replicate, Shard or Partial {where(mesh, i)}", p, "Redistribute it.")
        if p.is_replicate() or p.is_partial():
            ways.append("same" if p.is_replicate() else "sum")
        else:
            ways.append("cols" if p.dim == base.dim() - 1 else "data")
    return Layout(mesh, COMPOSE, tuple(ways), (), tokens)


def placements(lay: Layout, arg: str, dims: int, gradient: bool = False) -> Placements:
    """How an argument of so many axes must lie, or how its gradient does."""
    found: list[Any] = []
    for i, way in enumerate(lay.ways):
        kind = lay.table[way].get(arg, "RR")[int(gradient)]
        if kind == "R":
            found.append(Replicate())
        elif kind == "P":
            found.append(Partial())
        elif kind in "L012":
            found.append(Shard(dims - 1 if kind == "L" else int(kind)))
        else:
            found.append(lay.rows[i] if kind == "N" else lay.tokens[i])
    return tuple(found)


def local(fn: str, lay: Layout, arg: str, t: Any, move: bool = False) -> Any:
    """This process's part of an argument, through which its gradient finds back. ``move``: it may lie otherwise."""
    if t is None:
        return None
    want, have = placements(lay, arg, t.dim()), placed(t, lay.mesh)
    gradient = placements(lay, arg, t.dim(), True)
    # only what lies as the rows of W may be strided: of a Shard that was made here Dynamo (torch 2.8) does not know the type
    strided = [lay.table[way].get(arg, "RR")[0] == "N" and is_strided(lay.rows[i]) for i, way in enumerate(lay.ways)]
    agree = [is_same(a, b) and is_strided(b) == cut for a, b, cut in zip(want, have, strided, strict=True)]
    if not all(agree):
        i = agree.index(False)
        if not move or strided[i] or is_strided(have[i]):
            raise _misplaced(fn, lay, arg, t, want[i], have[i], i)
    if not isinstance(t, DTensor):
        if all(agree) and (not t.requires_grad or all([p.is_replicate() for p in gradient])):
            return t
        t = DTensor.from_local(t, lay.mesh, have, run_check=False)
    if not all(agree):
        t = t.redistribute(placements=want)
    return t.to_local(grad_placements=gradient)


def part(W: Any) -> Any:
    """This process's part of W, or of what else has no gradient."""
    return W.to_local() if isinstance(W, DTensor) else W


def _misplaced(fn: str, lay: Layout, arg: str, t: Any, want: Any, have: Any, i: int) -> FdoraError:
    what = f"base is {lay.tokens[i]}" if lay.table is COMPOSE else f"W is {lay.rows[i]}"
    if not isinstance(t, DTensor):
        have, remedy = f"a plain tensor, which counts as {have}", "Wrap each process's part with DTensor.from_local."
    elif arg == "x":
        remedy = "Redistribute it; if W is what FSDP keeps in shards, unshard that first."
    else:
        remedy = "Redistribute it."
    return fail(fn, arg, f"{want} {where(lay.mesh, i)}, on which {what}", have, remedy)


def where(mesh: Any, i: int) -> str:
    return f"on mesh dimension {mesh.mesh_dim_names[i] if mesh.mesh_dim_names else i}"


def whole(t: Tensor, mesh: Any, lies: Sequence[Any], shape: Sequence[int]) -> Any:
    """The DTensor of everyone's parts. Its shape is given: it cannot be told from one part where others are shorter."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(1, shape[i + 1])
    return DTensor.from_local(t, mesh, tuple(lies), run_check=False, shape=Size(shape), stride=tuple(stride))


def summed(lies: Sequence[Any]) -> Placements:
    """The same placements after all pending sums."""
    return tuple([Replicate() if p.is_partial() else p for p in lies])


def sums_over(lay: Layout) -> tuple[Any, ...]:
    """The mesh dimensions that the columns of W are spread over."""
    return tuple([(lay.mesh, i) for i, way in enumerate(lay.ways) if way == "row"])


def begins(t: Any, mesh: Any, axis: int) -> int:
    """Where in the whole tensor this process's part begins along an axis: torch.chunk, one mesh dimension after the other."""
    start, length = 0, t.shape[axis]
    if not isinstance(t, DTensor):
        return start
    for i, p in enumerate(t.placements):
        if is_cut(p, (axis,)):
            chunk = -(-length // mesh.size(i))
            before = min(length, chunk * mesh.get_coordinate()[i])
            start, length = start + before, min(chunk, length - before)
    return start
