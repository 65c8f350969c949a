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

from fdora._check import check_only, fail
from fdora._records import Conv
from fdora.functional._layout import (
    BANK,
    CONV,
    TABLE,
    TABLE_OF_ROWS,
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
from fdora.functional._sharded import biased, called, check_no_group, local_layer, norm_of, output
from fdora.functional.bank import norm_over
from fdora.functional.layer import DoraLayer, parts, tensors_of

GEOMETRY = Conv._fields  # Dynamo (torch 2.8) does not read them off a record


def multi(call: Callable, x: Any, layer: DoraLayer, ids: Any, p: Any, **rest: Any) -> Any:
    fn, W = "dora_linear_multi", layer.W
    if isinstance(p, (Tensor, list, tuple)) or p:
        raise fail(fn, "dropout_p", "0 with DTensors", p, "A mask counts the tokens of its adapter in all processes.")
    mesh = mesh_of(fn, {"x": x} | tensors_of(layer, ids=ids))
    lay = layout(fn, mesh, BANK, W, x, (0,))
    if "data" in lay.ways and (ids is None or tuple(ids.shape) != tuple(x.shape[:-1])):
        have = "offsets" if ids is None else f"{tuple(ids.shape)}"
        raise fail(fn, "ids", f"{tuple(x.shape[:-1])} where x is cut by tokens", have, "They are cut as x is.")
    who = None if ids is None else local(fn, lay, "ids", ids)

    def norm(W: Any, A: Any, B: Any, s: Any, over: Any) -> Tensor:
        ranks = rest["ranks"]
        return norm_over(fn, (W, A, B), s, None if ranks is None else tuple(ranks), over, rest["backend"])

    la, bias = local_layer(fn, lay, layer, norm)
    y = called(call, local(fn, lay, "x", x), la, ids=who, **rest)
    return output(fn, lay, y, x, W, bias)


def norm_of_bank(fn: str, W: Any, A: Any, B: Any, s: Any, group: Any, backend: Any) -> Any:
    """c (G, N), which lies as the rows of W."""
    check_no_group(fn, group)
    lay = layout(fn, mesh_of(fn, {"W": W, "A": A, "B": B}), BANK, W, None, ())
    a, b = (local(fn, lay, arg, t.detach()) for arg, t in (("A", A), ("B", B)))
    c = norm_over(fn, (part(W), a, b), s, None, sums_over(lay), backend)
    return whole(c, lay.mesh, placements(lay, "norm", 2), (A.shape[0], W.shape[0]))


def embedding(call: Callable, ids: Any, layer: DoraLayer, padding_idx: int | None, **rest: Any) -> Any:
    """A process that has not a token's row adds zeros to the sum; a number that is no row of the whole gives NaN."""
    fn, W = "dora_embedding", layer.W
    norm_axis, max_norm, backend = rest["norm_axis"], rest["max_norm"], rest["backend"]
    mesh = mesh_of(fn, {"ids": ids} | tensors_of(layer))
    lay = layout(fn, mesh, TABLE if norm_axis == 0 else TABLE_OF_ROWS, W, ids, range(ids.dim()))
    if "columns" in lay.ways:
        remedy = "Cut W by rows: the length of a row has to be known."
        check_only(fn, "where W is cut by columns", remedy, norm_axis=(norm_axis, 0), max_norm=(max_norm, None))
    w, a, b, m, s, _, c = parts(local_layer(fn, lay, layer)[0])
    who = here = local(fn, lay, "ids", ids)
    spread = tuple([(mesh, i) for i, way in enumerate(lay.ways) if way == "vocabulary"])
    if spread and c is None and norm_axis == 0:
        c = norm_of("dora_norm", backend)(w.T, a, b, s, spread)
    V, start = W.shape[0], begins(W, mesh, 0)
    if padding_idx is not None:
        padding_idx += V if padding_idx < 0 else 0
        padding_idx = padding_idx - start if start <= padding_idx < start + w.shape[0] else None
    if spread:
        mine = (who >= start) & (who < start + w.shape[0])
        here = torch.where(mine, who - start, 0)
        if w.shape[0] == 0:  # a row to look up
            w, a = pad(w, (0, 0, 0, 1)), pad(a, (0, 1))
            m, c = (pad(t, (0, 1)) if norm_axis == 1 and t is not None else t for t in (m, c))
    y = call(here, w, a, b, m, s=s, norm=c, padding_idx=padding_idx, **rest)
    if spread:
        y = torch.where(mine[..., None], y, 0)
        y = torch.where(((who < 0) | (who >= V))[..., None], float("nan"), y)
    return biased(fn, lay, y, (*ids.shape, W.shape[1]), None)


def conv(call: Callable, fn: str, n: int, x: Any, layer: DoraLayer, asked: tuple[Any, ...], backend: Any) -> Any:
    W, (_, _, _, groups, _, transposed, _) = layer.W, asked
    mesh = mesh_of(fn, {"x": x} | tensors_of(layer))
    lay = layout(fn, mesh, CONV, W, x, (0,))
    if x.dim() != n + 2:
        raise fail(fn, "x", f"of {n + 2} axes with DTensors", x.dim(), "Give it an axis of images: x[None].")
    cut = next((i for i, way in enumerate(lay.ways) if way in ("col", "row")), None)
    if cut is not None:
        remedy = f"Replicate W {where(mesh, cut)}, and cut x by images."
        check_only(fn, "where W is cut", remedy, groups=(groups, 1), transposed=(transposed, False))

    def norm(W: Any, A: Any, B: Any, s: Any, over: Any) -> Tensor:
        return norm_of("dora_norm", backend)(W.flatten(1), A.flatten(1), B.flatten(1), s, over)

    la, bias = local_layer(fn, lay, layer, norm)
    y = called(call, local(fn, lay, "x", x), la, backend=backend, **dict(zip(GEOMETRY, asked, strict=True)))
    shape = list(y.shape)
    for i in range(mesh.ndim):  # images and channels of the whole
        if is_cut(lay.tokens[i], (0,)):
            shape[0] = x.shape[0]
        if lay.ways[i] == "col":
            shape[1] = W.shape[0]
    return biased(fn, lay, y, shape, bias, n)


def experts(call: Callable, x: Any, layer: DoraLayer, **rest: Any) -> Tensor:
    """Each process has some experts, whole, and the tokens that were sent to it: nothing is shared but the mesh."""
    fn, stacks = "dora_experts", tensors_of(layer)
    mesh = mesh_of(fn, {"x": x} | stacks)
    if isinstance(x, DTensor):
        remedy = "Pass those that were sent to this process, with their offsets or ids among its experts."
        raise fail(fn, "x", "a plain tensor, the tokens of this process's experts", "a DTensor", remedy)
    for arg, t in stacks.items():
        lies = () if t is None else placed(t, mesh)
        if not all([is_cut(p, (0,)) for p in lies]):
            raise fail(fn, arg, "Shard(0), by experts", tuple(map(str, lies)), "Unshard or redistribute it.")
    W, A, B, m, bias, norm = (t.to_local() if isinstance(t, DTensor) else t for t in stacks.values())
    if W.shape[0] == 0 and x.shape[0] == 0:
        return x.new_zeros(0, W.shape[1])
    return called(call, x, DoraLayer(W, A, B, m, layer.s, bias, norm), **rest)
