"""The door for DTensors: take this process's parts, call the function on them, put its result together.

Between the parts no value is looked at and nothing is sent, but squares of a norm whose columns are spread, and the sum that a
bias waits for. A process whose part is empty calls like the others: they wait for it in backward.

In functions of the weight alone W may lie as FSDP keeps it, for rows need no other rows: A and B are brought to where W lies.
Of storage of FSDP A is gathered (4 r K bytes), B lies there already. Of W nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad

from fdora._check import check_only, fail
from fdora._records import Conv
from fdora.autograd.norm import base_sqnorm, row_norm, row_sqnorm, sharded_guarded_norm, sharded_norm
from fdora.functional._layout import (
    BANK,
    CONV,
    TABLE,
    TABLE_OF_ROWS,
    Layout,
    begins,
    compose_layout,
    is_cut,
    layer_layout,
    layout,
    local,
    mesh_of,
    part,
    placed,
    placements,
    summed,
    sums_over,
    where,
    whole,
)
from fdora.functional._seed import check_origin
from fdora.functional.backend import select_backend
from fdora.functional.bank import norm_over
from fdora.functional.layer import DoraLayer, parts, tensors_of
from fdora.functional.norm_state import NormHow, NormState, ShardNormState, check_norm, start_of


def linear(call: Callable, x: Any, layer: DoraLayer, *dropout: Any, **rest: Any) -> Any:
    def of_one(x: Any, layers: Sequence[DoraLayer], **rest: Any) -> Any:
        return [called(call, x, *layers, **rest)]

    fn = "dora_linear"
    return group(of_one, fn, x, {fn: layer}, *dropout, **rest)[0]


def called(call: Callable, x: Any, layer: DoraLayer, **rest: Any) -> Any:
    W, A, B, m, s, bias, norm = layer
    return call(x, W, A, B, m, s=s, bias=bias, norm=norm, **rest)


def group(
    call: Callable, fn: str, x: Any, layers: dict[str, DoraLayer], p: float, seed: Any, origin: Any, **rest: Any
) -> tuple:
    """``layers``: by what errors call them."""
    lays = _layouts(fn, x, layers)
    for label, lay in zip(layers, lays, strict=True):
        if lay.ways != lays[0].ways:
            have, want = tuple(map(str, lay.rows)), tuple(map(str, lays[0].rows))
            raise fail(label, "W", f"{want}, as in layers[0]", have, "Put layers with other placements into another call.")
    ready = _local_layers(layers, lays, layers.values(), rest["backend"])
    at = _origin(fn, lays[0], x, p, seed, origin)
    ys = call(local(fn, lays[0], "x", x), [la for la, _ in ready], dropout_p=p, seed=seed, mask_origin=at, **rest)
    each = zip(layers.items(), lays, ys, ready, strict=True)
    return tuple([output(label, lay, y, x, la.W, bias) for (label, la), lay, y, (_, bias) in each])


def mlp(call: Callable, x: Any, layers: Sequence[DoraLayer], p: float, seed: Any, origin: Any, **rest: Any) -> Any:
    fn, (gate, up, down) = "dora_mlp", layers
    names = [f"{fn}: {part}" for part in ("gate", "up", "down")]
    first, second = _layouts(fn, x, dict(zip(names, (gate, up), strict=False)), {names[2]: down})
    if first.ways != second.ways:
        want = f"{tuple(map(str, first.rows))}, as in gate"
        raise fail(names[1], "W", want, tuple(map(str, second.rows)), "Cut both in the same way.")
    below = layer_layout(names[2], first.mesh, down.W)
    for above, way in zip(first.ways, below.ways, strict=True):
        if above == "row" or (above == "col") != (way == "row"):
            both = f"{tuple(map(str, first.rows))} and down's {tuple(map(str, below.rows))}"
            raise fail(fn, "gate.W", "Shard(0) where down's is Shard(1), else Replicate", both, "Cut all three along F.")
    ways = tuple(["row" if way == "col" else way for way in first.ways])
    third = Layout(below.mesh, below.table, ways, below.rows, first.tokens)
    ready = _local_layers(names, (first, second, third), layers, rest["backend"])
    at = _origin(fn, first, x, p, seed, None)
    if at is not None:
        t0, f0 = check_origin(fn, origin, "(t0, f0)") or (0, 0)
        at = (at[0] + t0, begins(down.W, first.mesh, 1) + f0)
    y = call(local(fn, first, "x", x), *[la for la, _ in ready], dropout_p=p, seed=seed, mask_origin=at, **rest)
    return output(names[2], third, y, x, down.W, ready[2][1])


def compose(call: Callable, fn: str, base: Any, lora: Any, g: Any, s: float, bias: Any, **rest: Any) -> Any:
    mesh = mesh_of(fn, {"base": base, "lora": lora, "g": g, "bias": bias})
    lay = compose_layout(fn, mesh, base)
    pending = "sum" in lay.ways
    options = rest if bias is None else rest | {"bias": None if pending else local(fn, lay, "bias", bias)}
    y = call(*(local(fn, lay, arg, t) for arg, t in (("base", base), ("lora", lora), ("g", g))), s=s, **options)
    return biased(fn, lay, y, base.shape, bias if pending else None)


def scale(call: Callable, m: Any, c: Any) -> Any:
    fn, mesh = "dora_scale", mesh_of("dora_scale", {"m": m, "c": c})
    lies = placed(c, mesh)
    if placed(m, mesh) != lies or any([p.is_partial() for p in lies]):
        have = f"{tuple(map(str, placed(m, mesh)))} and c {tuple(map(str, lies))}"
        raise fail(fn, "m", "cut as c is", have, "Redistribute it.")
    parts = [t.to_local(grad_placements=lies) if isinstance(t, DTensor) else t for t in (m, c)]
    return whole(call(*parts), mesh, lies, c.shape)


def merge(call: Callable, fn: str, layer: DoraLayer, backend: Any) -> Any:
    lay = layer_layout(fn, mesh_of(fn, tensors_of(layer)), layer.W)
    (w, a, b, m, s, _, c), _ = local_layer(fn, lay, layer, norm_of(fn, backend), move=True)
    return whole(call(w, a, b, m, s=s, norm=c, backend=backend), lay.mesh, lay.rows, layer.W.shape)


def _layouts(fn: str, x: Any, layers: dict[str, DoraLayer], others: dict[str, DoraLayer] | None = None) -> list[Layout]:
    """Of each layer beside x. All tensors, of others too, lie on one mesh."""
    tensors = {"x": x}
    for label, la in (layers | (others or {})).items():
        part = label.removeprefix(fn).removeprefix(": ")
        tensors |= {f"{part}.{arg}" if part else arg: t for arg, t in tensors_of(la).items()}
    mesh = mesh_of(fn, tensors)
    return [layer_layout(label, mesh, la.W, x) for label, la in layers.items()]


def local_layer(fn: str, lay: Layout, layer: DoraLayer, norm: Any = None, move: bool = False) -> tuple[DoraLayer, Any]:
    """This process's part of a layer, and the bias, where it must wait for the sum. ``norm`` gives c of whole rows, where the
    function itself would see some columns only; ``move`` as for :func:`local`."""
    W, A, B, m, s, bias, c = layer
    over, W = sums_over(lay), part(W)
    A, B, m, c = (local(fn, lay, arg, t, move) for arg, t in (("A", A), ("B", B), ("m", m), ("norm", c)))
    if over and m is not None and c is None:
        c = norm(W, A, B, s, over)
    return DoraLayer(W, A, B, m, s, None if over else local(fn, lay, "bias", bias), c), bias if over else None


def _local_layers(names: Iterable[str], lays: Iterable[Layout], layers: Iterable[DoraLayer], backend: Any) -> list:
    """:func:`local_layer` of each, by the name that errors give it."""
    every = zip(names, lays, layers, strict=True)
    return [local_layer(label, lay, la, norm_of(label, backend)) for label, lay, la in every]


def norm_of(fn: str, backend: Any) -> Callable:
    """What gives c, detached, where the columns of W are spread over these dimensions of meshes."""

    def norm(W: Any, A: Any, B: Any, s: Any, over: Any) -> Tensor:
        return sharded_norm(check_norm(fn, W, A, B, s, NormHow()), over, select_backend(W, backend=backend).name)

    return norm


def _origin(fn: str, lay: Layout, x: Any, p: Any, seed: Any, origin: Any) -> tuple[int, int] | None:
    """Where this process's x begins in the whole one: the masks are those of one process."""
    if not p:
        return None
    if seed is None:
        remedy = "Masks of parts fit each other only if their seeds agree."
        raise fail(fn, "seed", "given, the same in every process, for DTensors", "None", remedy)
    axes = {at.dim for at in lay.tokens if not at.is_replicate() and not at.is_partial()} - {x.dim() - 1}
    cut = min(axes, default=0)
    if len(axes) > 1 or any([n != 1 for n in x.shape[:cut]]):
        have = tuple(map(str, lay.tokens))
        remedy = "The tokens of a part must follow each other: flatten x before it is cut, or cut its first axis."
        raise fail(fn, "x", "cut along its first axis for dropout", have, remedy)
    t0 = begins(x, lay.mesh, cut) if axes else 0
    for n in x.shape[cut + 1 : -1]:
        t0 *= n
    first, column = check_origin(fn, origin) or (0, 0)
    return first + t0, column + begins(x, lay.mesh, x.dim() - 1)


def output(fn: str, lay: Layout, y: Tensor, x: Any, W: Any, bias: Any) -> Any:
    return biased(fn, lay, y, (*x.shape[:-1], W.shape[0]), bias)


def biased(fn: str, lay: Layout, y: Tensor, shape: Sequence[int], bias: Any, behind: int = 0) -> Any:
    """The whole y; with a bias that waited for it, after the sum. ``behind``: axes of y behind that of the bias."""
    lies = placements(lay, "y", len(shape))
    result = whole(y, lay.mesh, lies, shape)
    if bias is None:
        return result
    lies = summed(lies)
    y = result.redistribute(placements=lies).to_local(grad_placements=lies)
    added = local(fn, lay, "bias", bias)
    return whole((y + added.view(-1, *[1] * behind)).to(y.dtype), lay.mesh, lies, shape)


def check_no_group(fn: str, group: Any) -> None:
    if group is not None:
        have = f"a {type(group).__name__}"
        raise fail(fn, "group", "None for DTensors", have, "A DTensor's mesh says which processes share it.")


def norm(fn: str, W: Any, A: Any, B: Any, s: Any, how: NormHow, backend: Any) -> Any:
    check_no_group(fn, how.group)
    if how.norm_axis == 0:
        W, A, B, how = W.T, B.T, A.T, how._replace(norm_axis=1)
    base, seen = how.base_sqnorm, how.state
    lay = layer_layout(fn, mesh_of(fn, {"W": W, "A": A, "B": B, "base_sqnorm": base}), W)
    w, a, b = part(W), local(fn, lay, "A", A, True), local(fn, lay, "B", B, True)
    base = None if base is None else local(fn, lay, "c", base)
    seen = None if seen is None else NormState(getattr(seen, "part", part(seen.c)), seen.fingerprint)
    of = check_norm(fn, w, a, b, s, how._replace(base_sqnorm=base, state=seen))
    over, choice = sums_over(lay), select_backend(w, backend=backend).name
    pending = placements(lay, "c", 1)
    lies = summed(pending)
    if how.squared:
        return whole(row_sqnorm(of, choice), lay.mesh, pending, W.shape[:1])
    if seen is not None:
        c, now, mine = sharded_guarded_norm(of, *seen, over, choice)
        return ShardNormState(whole(c, lay.mesh, lies, W.shape[:1]), now, mine)
    c = sharded_norm(of, over, choice, how.detach) if over else row_norm(of, choice, how.detach)
    return whole(c, lay.mesh, lies, W.shape[:1])


def norm_state(W: Any) -> ShardNormState:
    c, fingerprint = start_of(part(W))
    lay = layer_layout("dora_norm_state", W.device_mesh, W)
    return ShardNormState(whole(c, lay.mesh, summed(placements(lay, "c", 1)), W.shape[:1]), fingerprint, c)


def base(fn: str, W: Any, max_bytes: int | None, backend: Any) -> Any:
    lay, w = layer_layout(fn, W.device_mesh, W), part(W)
    found = base_sqnorm(w, max_bytes, select_backend(w, backend=backend).name)
    return whole(found, lay.mesh, placements(lay, "c", 1), W.shape[:1])


def init(fn: str, W: Any, A: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """``A``: the whole one, of which that of the mesh's first process is taken everywhere."""
    lay: Layout = layer_layout(fn, W.device_mesh, W)
    w = part(W.detach())
    a = distribute_tensor(A, lay.mesh, placements(lay, "A", 2))
    zeros = torch.zeros((w.shape[0], A.shape[0]), dtype=A.dtype, device=w.device)
    b = whole(zeros, lay.mesh, placements(lay, "B", 2), (W.shape[0], A.shape[0]))
    m = norm(fn, W.detach(), a, b, 1.0, NormHow(), "auto")
    return a.to(dtype), b.to(dtype), m


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
