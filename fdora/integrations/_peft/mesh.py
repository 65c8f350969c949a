"""A base weight that is a DTensor: where the layer runs, under tensor parallelism; where an adapter is made, also of FSDP.

PEFT's own code mixes DTensors with plain tensors here, and raises. fdora's functions take both. What stands around the base
layer (the hooks of torch's parallelize_module, transformers' own forward) lays x out and puts y where the model wants it, and
is used for that; those on A and B are not: their products are inside of the one call.

rows of W      A is whole, B and m are cut as W is; each process has its rows of y
columns of W   A is cut as W is, B and m are whole; the norm and y are sums over the processes, the bias is added after them
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, distributed, nn

from fdora._torch import PLAIN
from fdora.functional import dora_linear, dora_norm
from fdora.integrations._peft.dora import Dora, paused
from fdora.integrations._peft.parts import linear, parts_of

TRANSFORMERS = "transformers.distributed.tensor_parallel"
STYLES = ("colwise", "rowwise")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def lies_on_mesh(W: Any) -> bool:
    return type(W) not in PLAIN and hasattr(W, "placements") and hasattr(W, "device_mesh")


def on_mesh(module: Any, name: str, variant: Dora, x: Tensor) -> Tensor | str:
    """The layer's output; or why it is left to PEFT's code."""
    base, dropout = module.base_layer, module.lora_dropout[name]
    W, s, magnitude = base.weight, module.scaling[name], module.lora_magnitude_vector[name]
    why = paused(magnitude, s) or around(base)
    if why or module.fan_in_fan_out or type(base) is not nn.Linear:
        return why or "a DTensor that is no torch.nn.Linear's"
    plain = module.lora_A[name].weight, module.lora_B[name].weight, magnitude.weight
    p = dropout.p if type(dropout) is nn.Dropout and module.training and dropout.training else 0.0
    if not p and type(dropout) not in (nn.Identity, nn.Dropout):
        return "another dropout than torch.nn.Dropout"

    def run(x: Any, bias: Any) -> Tensor:
        from torch.distributed.tensor import Partial, Shard

        parts = parts_of(W, *plain) if variant.detach and not p else None
        y = None if parts is None else linear(parts, variant, W, x, s, bias)
        if parts is not None and y is not None:
            lies, width = (Shard(y.dim() - 1), W.shape[0]) if parts.rows else (Partial(), None)
            return wrap(y, W.device_mesh, lies, width)
        A, B, m = factors(W, *plain)
        seed = agreed(W) if p else None
        c = variant.kept.on_mesh(W, A, B, s) if variant.detach else dora_norm(W, A, B, s=s, detach=False)
        return dora_linear(
            x, W, A, B, m, s=s, bias=bias, norm=c, dropout_p=p, dropout_mode="peft", seed=seed, keep_inner=variant.keep_inner
        )

    return by_style(base, x, run) if "forward" in base.__dict__ else by_hooks(base, x, run)


def around(base: Any) -> str:
    """Why what is done around the base layer's product is not known."""
    hooks = [f for kind in HOOKS for f in getattr(base, kind).values()]
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
        x = wrap(x, mesh, Replicate() if rows else Shard(x.dim() - 1), None if rows else base.in_features)
    bias = base.bias
    if base._hf_tp_plan == "rowwise" and style.should_use_local_tensors(base):
        bias = None  # the style adds it
    y: Tensor = style.transform_output_post_forward(base, run(x, bias), mesh)
    return y


def wrap(t: Tensor, mesh: Any, lies: Any, width: int | None = None) -> Any:
    from torch.distributed.tensor import DTensor

    if width is None:
        return DTensor.from_local(t, mesh, [lies], run_check=False)
    shape = torch.Size((*t.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, mesh, [lies], run_check=False, shape=shape, stride=stride)


def factors(W: Any, A: Any, B: Any, m: Any = None) -> tuple[Any, Any, Any]:
    """A, B and m as W wants them."""
    N, K = W.shape
    rows = [p.is_shard() and p.dim == 0 for p in W.placements]
    return (
        A if any(rows) else like(W, A, 1, K),
        like(W, B, 0, N) if any(rows) else B,
        like(W, m, 0, N) if any(rows) else m,
    )


def like(W: Any, t: Any, axis: int, length: int) -> Any:
    """t along this axis as W's placements cut it. PEFT has made A or B as long as this process's part already, or whole."""
    from torch.distributed.tensor import DTensor, Replicate

    if t is None or tuple(getattr(t, "placements", ())) == tuple(W.placements):
        return t
    mesh = W.device_mesh
    if not isinstance(t, DTensor) and t.shape[axis] != length:
        shape = torch.Size([length if i == axis else n for i, n in enumerate(t.shape)])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(t, mesh, W.placements, run_check=False, shape=shape, stride=stride)
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
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
    if not module.lora_magnitude_vector:
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
    layer = DoraLinearLayer(fan_in_fan_out=False)
    W, A, B = module.get_base_layer().weight.detach(), module.lora_A[name].weight, module.lora_B[name].weight
    local = B.shape[0] != W.shape[0] or getattr(module.get_base_layer(), "_hf_tp_plan", None) == "colwise"
    a, b, _ = factors(W, A, B)
    c: Any = dora_norm(W, a, b, s=float(module.scaling[name]))
    if not local:  # a plain B has a plain m beside it
        c = c.full_tensor()
    layer.weight = nn.Parameter(c.to(torch.promote_types(W.dtype, A.dtype)), requires_grad=True)
    module.lora_magnitude_vector[name] = layer
