"""The door for DTensors of what is not one linear layer: banks of adapters, embeddings, convolutions, experts.

As in _sharded.py: this process's parts, the function on them, its result put together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fdora._check import fail
from fdora._records import Conv
from fdora.autograd.multi import bank_norm
from fdora.autograd.sharded import root_of_sum
from fdora.functional._layout import (
    BANK,
    CONV,
    TABLE,
    TABLE_OF_ROWS,
    Layout,
    adapter_parts,
    begins,
    is_cut,
    layout,
    local,
    mesh_of,
    part,
    placed,
    placements,
    sums_over,
    where,
    whole,
)
from fdora.functional._sharded import biased
from fdora.functional.backend import select_backend
from fdora.functional.bank import check_bank, check_kernels, scalings
from fdora.functional.norm import dora_norm

GEOMETRY = Conv._fields  # Dynamo (torch 2.8) does not read them off a record


def multi(
    call: Callable,
    x: Any,
    W: Any,
    A: Any,
    B: Any,
    m: Any,
    s: Any,
    offsets: Any,
    ids: Any,
    norm: Any,
    bias: Any,
    p: float,
    **rest: Any,
) -> Any:
    fn = "dora_linear_multi"
    if p:
        raise fail(fn, "dropout_p", "0 with DTensors", p, "A mask counts the tokens of its adapter, which no part knows.")
    mesh = mesh_of(fn, {"x": x, "W": W, "A": A, "B": B, "m": m, "norm": norm, "bias": bias, "ids": ids})
    lay = layout(fn, mesh, BANK, W, x, (0,))
    if "data" in lay.ways and (ids is None or tuple(ids.shape) != tuple(x.shape[:-1])):
        have = "offsets" if ids is None else f"{tuple(ids.shape)}"
        raise fail(fn, "ids", f"{tuple(x.shape[:-1])} where x is cut by tokens", have, "They are cut as x is.")
    w, who, over = part(W), None if ids is None else local(fn, lay, "ids", ids), sums_over(lay)
    a, b, mag, c = adapter_parts(fn, lay, A, B, m, norm)
    if m is not None and c is None and over:
        c = _bank_norm(fn, lay, w, a, b, s, rest["ranks"], rest["backend"])
    late = "row" in lay.ways
    known = {"norm": c, "bias": None if late else local(fn, lay, "bias", bias)}
    y = call(local(fn, lay, "x", x), w, a, b, mag, s=s, offsets=offsets, ids=who, **known, **rest)
    return biased(fn, lay, y, (*x.shape[:-1], W.shape[0]), bias if late else None)


def norm_of_bank(fn: str, W: Any, A: Any, B: Any, s: Any, group: Any, backend: Any) -> Any:
    """c (G, N), which lies as the rows of W."""
    if group is not None:
        raise fail(fn, "group", "None for DTensors", f"a {type(group).__name__}", "They know what they are cut over.")
    lay = layout(fn, mesh_of(fn, {"W": W, "A": A, "B": B}), BANK, W, None, ())
    a, b = (local(fn, lay, arg, t.detach()) for arg, t in (("A", A), ("B", B)))
    c = _bank_norm(fn, lay, part(W), a, b, s, None, backend)
    return whole(c, lay.mesh, placements(lay, "norm", 2), (A.shape[0], W.shape[0]))


def _bank_norm(fn: str, lay: Layout, W: Any, A: Any, B: Any, s: Any, ranks: Any, backend: Any) -> Tensor:
    G = check_bank(fn, {"W": W, "A": A, "B": B})
    name = select_backend(W, backend=backend).name
    each = None if ranks is None else tuple(ranks)
    check_kernels(fn, A, name, each)
    c = bank_norm(W, A, B, scalings(fn, s, G, W), each, name)
    over = sums_over(lay)
    return root_of_sum(c.square(), over) if over else c


def embedding(
    call: Callable,
    ids: Any,
    W: Any,
    A: Any,
    B: Any,
    m: Any,
    s: float,
    norm: Any,
    norm_axis: int,
    padding_idx: int | None,
    max_norm: float | None,
    backend: Any,
) -> Any:
    """A process that has not a token's row adds zeros to the sum; a number that is no row of the whole gives NaN."""
    fn = "dora_embedding"
    mesh = mesh_of(fn, {"ids": ids, "W": W, "A": A, "B": B, "m": m, "norm": norm})
    lay = layout(fn, mesh, TABLE if norm_axis == 0 else TABLE_OF_ROWS, W, ids, range(ids.dim()))
    if "columns" in lay.ways and (norm_axis != 0 or max_norm is not None):
        arg, want = ("norm_axis", 0) if norm_axis != 0 else ("max_norm", None)
        have = norm_axis if norm_axis != 0 else max_norm
        raise fail(fn, arg, f"{want} where W is cut by columns", have, "Cut W by rows: it is about the length of a row.")
    rest = {"norm_axis": norm_axis, "max_norm": max_norm, "backend": backend}
    w, who = part(W), local(fn, lay, "ids", ids)
    a, b, mag, c = adapter_parts(fn, lay, A, B, m, norm)
    spread = tuple([(mesh, i) for i, way in enumerate(lay.ways) if way == "vocabulary"])
    if spread and c is None and norm_axis == 0:
        c = root_of_sum(dora_norm(w.T, a.detach(), b.detach(), s=s, squared=True, backend=backend), spread)
    V, start = W.shape[0], begins(W, mesh, 0)
    if padding_idx is not None:
        padding_idx += V if padding_idx < 0 else 0
        padding_idx = padding_idx - start if start <= padding_idx < start + w.shape[0] else None
    if not spread:
        y = call(who, w, a, b, mag, s=s, norm=c, padding_idx=padding_idx, **rest)
        return biased(fn, lay, y, (*ids.shape, W.shape[1]), None)
    mine = (who >= start) & (who < start + w.shape[0])
    if w.shape[0] == 0:  # a row to look up
        w, a = pad(w, (0, 0, 0, 1)), pad(a, (0, 1))
        mag, c = (pad(t, (0, 1)) if norm_axis == 1 and t is not None else t for t in (mag, c))
    y = call(torch.where(mine, who - start, 0), w, a, b, mag, s=s, norm=c, padding_idx=padding_idx, **rest)
    y = torch.where(mine[..., None], y, 0)
    y = torch.where(((who < 0) | (who >= V))[..., None], float("nan"), y)
    return biased(fn, lay, y, (*ids.shape, W.shape[1]), None)


def conv(call: Callable, fn: str, n: int, given: Any, asked: tuple[Any, ...], backend: Any) -> Any:
    x, W, A, B, m, s, bias, norm = given
    _, _, _, groups, _, transposed, _ = asked
    mesh = mesh_of(fn, {"x": x, "W": W, "A": A, "B": B, "m": m, "norm": norm, "bias": bias})
    lay = layout(fn, mesh, CONV, W, x, (0,))
    if x.dim() != n + 2:
        raise fail(fn, "x", f"of {n + 2} axes with DTensors", x.dim(), "Give it an axis of images: x[None].")
    cut = next((i for i, way in enumerate(lay.ways) if way in ("col", "row")), None)
    if cut is not None and (groups != 1 or transposed):
        arg, want, have = ("groups", 1, groups) if groups != 1 else ("transposed", False, True)
        raise fail(fn, arg, f"{want} where W is cut", have, f"Replicate W {where(mesh, cut)}, and cut x by images.")
    w, over = part(W), sums_over(lay)
    a, b, mag, c = adapter_parts(fn, lay, A, B, m, norm)
    if c is None and over:
        rows = (w.flatten(1), a.detach().flatten(1), b.detach().flatten(1))
        c = root_of_sum(dora_norm(*rows, s=s, squared=True, backend=backend), over)
    known: dict[str, Any] = {"norm": c, "bias": None if over else local(fn, lay, "bias", bias), "backend": backend}
    y = call(local(fn, lay, "x", x), w, a, b, mag, s=s, **known, **dict(zip(GEOMETRY, asked, strict=True)))
    shape = list(y.shape)
    for i in range(mesh.ndim):  # images and channels of the whole
        if is_cut(lay.tokens[i], (0,)):
            shape[0] = x.shape[0]
        if lay.ways[i] == "col":
            shape[1] = W.shape[0]
    return biased(fn, lay, y, shape, bias if over else None, n)


def experts(call: Callable, x: Any, W: Any, A: Any, B: Any, m: Any, bias: Any, norm: Any, **rest: Any) -> Tensor:
    """Each process has some experts, whole, and the tokens that were sent to it: nothing is shared but the mesh."""
    fn, stacks = "dora_experts", {"W": W, "A": A, "B": B, "m": m, "bias": bias, "norm": norm}
    mesh = mesh_of(fn, {"x": x} | stacks)
    if isinstance(x, DTensor):
        remedy = "Pass those that were sent to this process, with their offsets or ids among its experts."
        raise fail(fn, "x", "a plain tensor, the tokens of this process's experts", "a DTensor", remedy)
    for arg, t in stacks.items():
        lies = () if t is None else placed(t, mesh)
        if not all([is_cut(p, (0,)) for p in lies]):
            raise fail(fn, arg, "Shard(0), by experts", tuple(map(str, lies)), "Unshard or redistribute it.")
    w, a, b, mag, bias, norm = (t.to_local() if isinstance(t, DTensor) else t for t in stacks.values())
    if w.shape[0] == 0 and x.shape[0] == 0:
        return x.new_zeros(0, w.shape[1])
    y: Tensor = call(x, w, a, b, mag, bias=bias, norm=norm, **rest)
    return y
