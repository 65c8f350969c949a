"""The door for DTensors: take this process's parts, call the function on them, put its result together.

Between the parts no value is looked at and nothing is sent, but squares of a norm whose columns are spread, and the sum that a
bias waits for. A process whose part is empty calls like the others: they wait for it in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fdora._check import fail
from fdora.autograd.sharded import sharded_norm
from fdora.functional._layout import (
    Layout,
    adapter_parts,
    begins,
    compose_layout,
    layer_layout,
    local,
    mesh_of,
    part,
    placed,
    placements,
    summed,
    sums_over,
    whole,
)
from fdora.functional._seed import check_origin
from fdora.functional.backend import select_backend
from fdora.functional.group import DoraLayer
from fdora.functional.norm import NormHow, check_norm

FIELDS = DoraLayer._fields  # Dynamo (torch 2.8) does not read them off a layer


def linear(call: Callable, x: Any, layer: DoraLayer, p: float, seed: Any, origin: Any, **rest: Any) -> Any:
    fn = "dora_linear"
    (lay,) = _layouts(fn, x, {"": layer})
    la, bias = _local_layer(fn, lay, layer, rest["backend"])
    at = _origin(fn, lay, x, p, seed, origin)
    y = call(
        local(fn, lay, "x", x),
        la.W,
        la.A,
        la.B,
        la.m,
        s=la.s,
        bias=la.bias,
        norm=la.norm,
        dropout_p=p,
        seed=seed,
        mask_origin=at,
        **rest,
    )
    return _output(fn, lay, y, x, layer.W, bias)


def group(call: Callable, x: Any, layers: Sequence[DoraLayer], p: float, seed: Any, origin: Any, **rest: Any) -> tuple:
    fn = "dora_linear_group"
    named = {f": layers[{i}]": la for i, la in enumerate(layers)}
    lays = _layouts(fn, x, named)
    for label, lay in zip(named, lays, strict=True):
        if lay.ways != lays[0].ways:
            have, want = tuple(map(str, lay.rows)), tuple(map(str, lays[0].rows))
            raise fail(fn + label, "W", f"{want}, as in layers[0]", have, "Layers that lie otherwise are another call.")
    ready = [_local_layer(fn + label, lay, la, rest["backend"]) for (label, la), lay in zip(named.items(), lays, strict=True)]
    at = _origin(fn, lays[0], x, p, seed, origin)
    ys = call(local(fn, lays[0], "x", x), [la for la, _ in ready], dropout_p=p, seed=seed, mask_origin=at, **rest)
    each = zip(named.items(), lays, ys, ready, strict=True)
    return tuple([_output(fn + label, lay, y, x, la.W, bias) for (label, la), lay, y, (_, bias) in each])


def mlp(call: Callable, x: Any, layers: dict[str, DoraLayer], p: float, seed: Any, origin: Any, **rest: Any) -> Any:
    fn, (gate, up, down) = "dora_mlp", layers.values()
    first, second = _layouts(fn, x, {": gate": gate, ": up": up}, [down])
    if first.ways != second.ways:
        want = f"{tuple(map(str, first.rows))}, as in gate"
        raise fail(f"{fn}: up", "W", want, tuple(map(str, second.rows)), "Cut both in the same way.")
    below = layer_layout(f"{fn}: down", first.mesh, down.W)
    for above, way in zip(first.ways, below.ways, strict=True):
        if above == "row" or (above == "col") != (way == "row"):
            both = f"{tuple(map(str, first.rows))} and down's {tuple(map(str, below.rows))}"
            raise fail(fn, "gate.W", "Shard(0) where down's is Shard(1), else Replicate", both, "Cut all three along F.")
    ways = tuple(["row" if way == "col" else way for way in first.ways])
    third = Layout(below.mesh, below.table, ways, below.rows, first.tokens)
    la, _ = _local_layer(f"{fn}: gate", first, gate, rest["backend"])
    lb, _ = _local_layer(f"{fn}: up", second, up, rest["backend"])
    lc, bias = _local_layer(f"{fn}: down", third, down, rest["backend"])
    at = _origin(fn, first, x, p, seed, None)
    if at is not None:
        t0, f0 = check_origin(fn, origin, "(t0, f0)") or (0, 0)
        at = (at[0] + t0, begins(down.W, first.mesh, 1) + f0)
    y = call(local(fn, first, "x", x), la, lb, lc, dropout_p=p, seed=seed, mask_origin=at, **rest)
    return _output(f"{fn}: down", third, y, x, down.W, bias)


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


def merge(call: Callable, fn: str, W: Any, A: Any, B: Any, m: Any, s: float, norm: Any, backend: Any) -> Any:
    lay = layer_layout(fn, mesh_of(fn, {"W": W, "A": A, "B": B, "m": m, "norm": norm}), W)
    w = part(W)
    a, b, mag, c = adapter_parts(fn, lay, A, B, m, norm, True)
    c = _norm(fn, lay, w, a, b, s, c, backend)
    return whole(call(w, a, b, mag, s=s, norm=c, backend=backend), lay.mesh, lay.rows, W.shape)


def _layouts(fn: str, x: Any, layers: dict[str, DoraLayer], others: Sequence[DoraLayer] = ()) -> list[Layout]:
    """Of each layer beside x. All tensors lie on one mesh."""
    tensors = {"x": x}
    for label, la in layers.items():
        tensors |= {f"{label[2:]}.{arg}" if label else arg: t for arg, t in zip(FIELDS, la, strict=True)}
    tensors |= {f"down.{arg}": t for la in others for arg, t in zip(FIELDS, la, strict=True)}
    mesh = mesh_of(fn, tensors)
    return [layer_layout(fn + label, mesh, la.W, x) for label, la in layers.items()]


def _local_layer(fn: str, lay: Layout, layer: DoraLayer, backend: Any) -> tuple[DoraLayer, Any]:
    """This process's part of a layer, and the bias, where it must wait for the sum."""
    W, A, B, m, s, bias, norm = layer
    w = part(W)
    a, b, mag, c = adapter_parts(fn, lay, A, B, m, norm)
    if A is not None:
        c = _norm(fn, lay, w, a, b, s, c, backend)
    late = "row" in lay.ways
    return DoraLayer(w, a, b, mag, s, None if late else local(fn, lay, "bias", bias), c), bias if late else None


def _norm(fn: str, lay: Layout, W: Any, A: Any, B: Any, s: Any, norm: Any, backend: Any) -> Any:
    """c of whole rows, where the function itself would see some columns only."""
    over = sums_over(lay)
    if norm is not None or not over:
        return norm
    return sharded_norm(check_norm(fn, W, A, B, s, NormHow()), over, select_backend(W, backend=backend).name)


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


def _output(fn: str, lay: Layout, y: Tensor, x: Any, W: Any, bias: Any) -> Any:
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
