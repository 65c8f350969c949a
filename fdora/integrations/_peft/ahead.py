"""The calls that a model which use_fdora runs makes for its linear layers, each form of them once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_mlp
from fdora.functional.prepared import Ahead
from fdora.integrations._peft.blocks import Mlp
from fdora.integrations._peft.calls import active, call_of
from fdora.integrations._peft.fast_path import Call, how_called
from fdora.integrations._peft.layer import Linear
from fdora.integrations._peft.patterns import act_of


def calls_of(model: nn.Module) -> list[Ahead]:
    """Of its MLPs, of its q, k and v, and of the layers beside them. What runs PEFT's code is left out."""
    found: dict[Any, Ahead] = {}
    seen: set[Any] = set()
    for module in model.modules():
        together, act = members(module)
        calls = [read(layer) for layer in together]
        if not calls or None in calls or not seen.isdisjoint(together):
            continue
        seen.update(together)
        call = ahead(calls, act)  # type: ignore[arg-type]
        found.setdefault(call.form, call)
    return list(found.values())


def members(module: Any) -> tuple[list[Any], str | None]:
    """The layers that run in one call when this module is called, or the first of them; the activation of an MLP."""
    if isinstance(module, Mlp):
        how = type(module).HOW
        act = None if how.packed else act_of(getattr(module, how.act))
        return ([] if act is None else [module._modules[name] for name in how.layers()]), act
    pair = active(module) if isinstance(module, Linear) else None
    if pair is None:
        return [], None
    return ([module] if pair[1].shared is None else [layer() for layer in pair[1].shared.layers]), None


def read(layer: Any) -> Call | None:
    pair, x = active(layer), next(layer.parameters())
    x = x.new_empty(0, dtype=torch.bfloat16) if x.dtype == torch.float8_e4m3fn else x
    call = "" if pair is None else call_of(layer, x, *pair)
    return call if isinstance(call, Call) else None


def ahead(calls: list[Call], act: str | None) -> Ahead:
    """Their norms are any: no kernel depends on them."""
    layers = []
    for _, W, A, B, m, bias, s, *_ in calls:
        A, B, m = (t.detach().requires_grad_(t.requires_grad) for t in (A, B, m))
        layers.append(DoraLayer(W, A, B, m, s, bias, torch.ones(W.shape[0], device=W.device)))
    first: Any = layers[0]
    W = first.W
    p, mode, _, (compute, grad_compute) = how_called(calls[0])
    how: dict[str, Any] = {"dropout_p": p, "dropout_mode": mode, "compute": compute, "grad_compute": grad_compute}
    if act is not None:
        return Ahead(dora_mlp, W, W.shape[1], tuple(layers), how | {"act": act})
    if len(layers) > 1:
        return Ahead(dora_linear_group, W, W.shape[1], (layers,), how)
    how |= {"s": first.s, "bias": first.bias, "norm": first.norm}
    return Ahead(dora_linear, W, W.shape[1], first[:4], how)
