"""Layers under tensor parallelism: the base weight is a DTensor where the layer runs, or (FSDP2) where an adapter is made.

PEFT's own code mixes DTensors with plain tensors here, and raises. fdora's functions take both. What stands around the base
layer (the hooks of torch's parallelize_module, transformers' own forward) lays x out and puts y where the model wants it, and
is used for that; those on A and B are not: their products are inside of the one call.

rows of W      A is whole, B and m are cut as W is; each process has its rows of y, and nothing is sent in forward
columns of W   A is cut as W is, B and m are whole; the norm and y are sums over the processes, the bias is added after them

PEFT's A, B and m are plain and whole in every process, or parts already. Where it can be, the product is dora_linear on parts
(:func:`parts_of`), with few collectives beside those of the activations. The gradient of what is whole is a sum over the
processes: those of one layer are one all-reduce. Rows of a whole m or B stand among zeros there, where they would want a
gather of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, distributed, nn

from fdora._torch import PLAIN, all_reduce_sum, eager_apply, is_traced, piece_of
from fdora.functional import dora_linear, dora_norm
from fdora.integrations._peft.sharded import HOOKS, modules_of

TRANSFORMERS = "transformers.distributed.tensor_parallel"
STYLES = ("colwise", "rowwise")


def lies_on_mesh(W: Any) -> bool:
    return type(W) not in PLAIN and hasattr(W, "placements") and hasattr(W, "device_mesh")


def on_mesh(module: Any, name: str, variant: Any, x: Tensor) -> Tensor | str:
    """The layer's output; or why it is left to PEFT's code."""
    base, dropout = module.base_layer, module.lora_dropout[name]
    W, s = base.weight, module.scaling[name]
    why = around(base)
    if why or module.fan_in_fan_out or type(base) is not nn.Linear:
        return why or "a DTensor that is no torch.nn.Linear's"
    plain = [part.weight for part in modules_of(module, name)]
    p = dropout.p if type(dropout) is nn.Dropout and module.training and dropout.training else 0.0
    if not p and type(dropout) not in (nn.Identity, nn.Dropout):
        return "another dropout than torch.nn.Dropout"

    def run(x: Any, bias: Any) -> Tensor:
        from torch.distributed.tensor import Partial, Shard

        mine = parts_of(W, *plain) if variant.detach and not p else None
        y = None if mine is None else linear(mine, variant, W, x, s, bias)
        if mine is not None and y is not None:
            lies, shape = (Shard(y.dim() - 1), (*y.shape[:-1], W.shape[0])) if mine.rows else (Partial(), None)
            return wrap(y, W.device_mesh, [lies], shape)
        A, B, m = factors(W, *plain)
        seed = agreed(W) if p else None
        c = variant.kept.on_mesh(W, A, B, s) if variant.detach else dora_norm(W, A, B, s=s, detach=False)
        drop = {"dropout_p": p, "dropout_mode": variant.dropout_mode, "seed": seed}
        return dora_linear(x, W, A, B, m, s=s, bias=bias, norm=c, keep_inner=variant.keep_inner, **drop)

    return by_style(base, x, run) if "forward" in base.__dict__ else by_hooks(base, x, run)


def around(base: Any) -> str:
    """Why what is done around the base layer's product is not known."""
    hooks = [f for kind in HOOKS[:2] for f in getattr(base, kind).values()]
    forward = base.__dict__.get("forward")
    if forward is not None:
        known = forward.__module__ == TRANSFORMERS and getattr(base, "_hf_tp_plan", None) in STYLES
        return "" if known and not hooks else "a forward of the base layer's own"
    known = bool(hooks) and all([f.__module__.startswith("torch.distributed.tensor") for f in hooks])
    return "" if known else "a DTensor for a weight, and nothing that lays x out for it"


def by_hooks(base: Any, x: Tensor, run: Any) -> Tensor:
    """parallelize_module's, which are called around what the module's forward is for now."""
    base.__dict__["forward"] = lambda x: run(x, base.bias)
    try:
        y: Tensor = base(x)
    finally:
        del base.__dict__["forward"]
    return y


def by_style(base: Any, x: Tensor, run: Any) -> Tensor:
    """transformers' style, whose forward has no place for another product."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    style, mesh = ALL_PARALLEL_STYLES[base._hf_tp_plan], base.weight.device_mesh
    (x, *_), _ = style.transform_inputs_pre_forward(base, (x,), {}, mesh)
    if not isinstance(x, DTensor):  # without a gradient it stays as it is
        rows = base._hf_tp_plan == "colwise"
        x = wrap(x, mesh, [Replicate() if rows else Shard(x.dim() - 1)], None if rows else (*x.shape[:-1], base.in_features))
    bias = base.bias
    if base._hf_tp_plan == "rowwise" and style.should_use_local_tensors(base):
        bias = None  # the style adds it
    y: Tensor = style.transform_output_post_forward(base, run(x, bias), mesh)
    return y


def wrap(t: Tensor, mesh: Any, lies: Sequence[Any], shape: Sequence[int] | None = None) -> Any:
    """This process's part as a DTensor, of this shape where that is not told from the part."""
    from torch.distributed.tensor import DTensor

    if shape is None:
        return DTensor.from_local(t, mesh, lies, run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, mesh, lies, run_check=False, shape=torch.Size(shape), stride=stride)


def factors(W: Any, A: Any, B: Any, m: Any = None) -> tuple[Any, Any, Any]:
    """A, B and m as W wants them."""
    N, K = W.shape
    rows = [p.is_shard() and p.dim == 0 for p in W.placements]
    return (A, like(W, B, 0, N), like(W, m, 0, N)) if any(rows) else (like(W, A, 1, K), B, m)


def like(W: Any, t: Any, axis: int, length: int) -> Any:
    """t along this axis as W's placements cut it. PEFT has made A or B as long as this process's part already, or whole."""
    from torch.distributed.tensor import DTensor, Replicate

    if t is None or tuple(getattr(t, "placements", ())) == tuple(W.placements):
        return t
    mesh = W.device_mesh
    if not isinstance(t, DTensor):
        if t.shape[axis] != length:
            return wrap(t, mesh, W.placements, [length if i == axis else n for i, n in enumerate(t.shape)])
        t = wrap(t, mesh, [Replicate()] * mesh.ndim)
    return t.redistribute(placements=W.placements)


def agreed(W: Any) -> Tensor:
    """A seed for all processes of the mesh: the first one's."""
    seed = torch.randint(2**62, (), device=W.device)
    for i in range(W.device_mesh.ndim):
        group = W.device_mesh.get_group(i)
        distributed.broadcast(seed, distributed.get_global_rank(group, 0), group)
    return seed


@torch.no_grad()
def init_on_mesh(module: Any, name: str) -> None:
    """What PEFT's variant does when an adapter is made, m by the norm of whole rows, as dora_norm has it."""
    W, A, B = module.get_base_layer().weight.detach(), module.lora_A[name].weight, module.lora_B[name].weight
    local = B.shape[0] != W.shape[0] or getattr(module.get_base_layer(), "_hf_tp_plan", None) == "colwise"
    a, b, _ = factors(W, A, B)
    c: Any = dora_norm(W, a, b, s=float(module.scaling[name]))
    if not local:  # a plain B has a plain m beside it
        c = c.full_tensor()
    put_magnitude(module, name, c.to(torch.promote_types(W.dtype, A.dtype)))


def put_magnitude(module: Any, name: str, m: Any) -> None:
    if not module.lora_magnitude_vector:
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
    layer = DoraLinearLayer(fan_in_fan_out=False)
    layer.weight = nn.Parameter(m, requires_grad=True)
    module.lora_magnitude_vector[name] = layer


class Cut(NamedTuple):
    """How this process's part is made of a parameter."""

    whole: bool = False
    """It is whole, and its gradient a sum over the processes; else it is the part."""
    axis: int = 0
    start: int = 0
    length: int = -1
    """Of the slice along the axis; -1 where all of it is wanted."""


class Parts(NamedTuple):
    """W, A, B and m of this process; how A, B and m are cut."""

    W: Tensor
    factors: tuple[Any, Any, Any]
    cuts: tuple[Cut, Cut, Cut]
    over: Any
    rows: bool

    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """W, A and B without a graph, for their norm: the same objects in every call, unless one is a slice."""
        A, B = (sliced(held(t), cut) for t, cut in zip(self.factors[:2], self.cuts[:2], strict=True))
        return self.W, A, B


def parts_of(W: Any, A: Any, B: Any, m: Any) -> Parts | None:
    """None where they lie in another way: then they go through the door for DTensors."""
    (lies, *more), piece = W.placements, piece_of(W)
    if is_traced() or more or piece is None or not (lies.is_shard(0) or lies.is_shard(1)) or W.requires_grad:
        return None
    axis = lies.dim
    count, length = W.device_mesh.size(), W.shape[axis]
    if length < count:  # a part may be as long as the whole: one process would take for whole what another takes for its part
        return None
    start, here = min(length, W.device_mesh.get_local_rank() * -(-length // count)), piece.shape[axis]
    follows = (False, True, True) if axis == 0 else (True, False, False)
    cuts: Any = [cut_of(t, axis, start, here, length) if f else whole_of(t) for t, f in zip((A, B, m), follows, strict=True)]
    return None if None in cuts else Parts(piece, (A, B, m), tuple(cuts), (W.device_mesh, 0), axis == 0)


def whole_of(t: Any) -> Cut | None:
    return None if hasattr(t, "placements") else Cut(True)


def cut_of(t: Any, axis: int, start: int, here: int, length: int) -> Cut | None:
    if hasattr(t, "placements"):
        return Cut() if len(t.placements) == 1 and t.placements[0].is_shard(axis) else None
    if t.shape[axis] == here:
        return Cut()
    return Cut(True, axis, start, here) if t.shape[axis] == length else None


def held(t: Any) -> Any:
    return piece_of(t) if hasattr(t, "placements") else t


def sliced(t: Tensor, cut: Cut) -> Tensor:
    return t if cut.length < 0 else t.detach().narrow(cut.axis, cut.start, cut.length)


class Share(torch.autograd.Function):
    """This process's parts of what is whole."""

    @staticmethod
    def forward(ctx: Any, over: Any, cuts: Sequence[Cut], *tensors: Tensor) -> Any:
        ctx.over, ctx.cuts, ctx.shapes = over, cuts, [t.shape for t in tensors]
        return tuple([sliced(t, cut) if cut.length >= 0 else t.view_as(t) for t, cut in zip(tensors, cuts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found: list[Any] = list(grads)
        together: dict[torch.dtype, list[int]] = {}
        for i, (g, wanted) in enumerate(zip(grads, ctx.needs_input_grad[2:], strict=True)):
            if wanted and g is not None:
                together.setdefault(g.dtype, []).append(i)
        for places in together.values():
            flat = torch.cat([full(grads[i], ctx.cuts[i], ctx.shapes[i]).reshape(-1) for i in places])
            flat = all_reduce_sum(flat, ctx.over)
            for i, g in zip(places, flat.split([ctx.shapes[i].numel() for i in places]), strict=True):
                found[i] = g.view(ctx.shapes[i])
        return None, None, *found


def full(g: Tensor, cut: Cut, shape: Any) -> Tensor:
    """The gradient of the whole: zeros where other processes have theirs."""
    if cut.length < 0:
        return g
    whole = g.new_zeros(shape)
    whole.narrow(cut.axis, cut.start, cut.length).copy_(g)
    return whole


def trained(parts: Parts) -> list[Tensor]:
    """A, B and m of this process, through which their gradients find back."""
    found = [t.to_local() if hasattr(t, "placements") else t for t in parts.factors]
    whole = [i for i, cut in enumerate(parts.cuts) if cut.whole]
    shared = eager_apply(Share)(parts.over, [parts.cuts[i] for i in whole], *[found[i] for i in whole])
    for i, t in zip(whole, shared, strict=True):
        found[i] = t
    return found


def linear(parts: Parts, variant: Any, W: Any, x: Any, s: float, bias: Any) -> Tensor | None:
    """This process's rows of y, or its share of their sum; None where x or the bias lie otherwise."""
    from torch.distributed.tensor import Partial

    lies = x.placements[0]
    if not (lies.is_replicate() if parts.rows else lies.is_shard(x.dim() - 1)):
        return None
    if bias is not None:
        if not (parts.rows and hasattr(bias, "placements") and bias.placements[0].is_shard(0)):
            return None
        bias = bias.to_local()
    variant.kept.look_at(W)
    w, a, b = parts.kept()
    c = variant.kept.of(w, w, a, b, s)
    if not parts.rows:
        with torch.no_grad():
            c = all_reduce_sum(c.square(), parts.over).sqrt()
    A, B, m = trained(parts)
    mine = x.to_local(grad_placements=[Partial() if parts.rows else lies])
    return dora_linear(mine, w, A, B, m, s=s, bias=bias, norm=c, keep_inner=variant.keep_inner)
