"""Whose norms the hooks of a model compute together (integrations/_tree.py), and where its layers' W, A and B lie then."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any

from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from fdora.functional import select_backend
from fdora.integrations._hook import hook, hooked
from fdora.integrations._peft.calls import active
from fdora.integrations._peft.dora import Dora, ours, reused
from fdora.integrations._peft.layer import Linear
from fdora.integrations._peft.mesh import lies_on_mesh, parts_of
from fdora.integrations._peft.quantised import FP8, family
from fdora.integrations._peft.sharded import modules_of, weight_of
from fdora.integrations._shard import lies_in_rows
from fdora.integrations._table import Found
from fdora.quant import QuantWeight
from fdora.quant.codes8 import in_trees


def hook_layers(model: nn.Module, layers: Iterable[Any], on_shards: bool) -> None:
    """On what is called. A PeftModel calls the model inside or, for a task, only its forward; generate calls that as well."""
    roots: list[nn.Module] = [model]
    if isinstance(model, PeftModel):
        inner = model.get_base_model()
        roots = [inner] if type(model).forward is PeftModel.forward else [model, inner]
    found = [layer for layer in layers if type(layer) is Linear]  # those that norms_of may list
    kepts = []
    for layer in found:
        for variant in ours(layer):
            variant.kept.base, variant.kept.layer = weakref.ref(layer._modules["base_layer"]), weakref.ref(layer)
            kepts.append(variant.kept)
    if kepts:
        linears = [weakref.ref(layer) for layer in found]
        shards = (lambda known: shards_of([each() for each in linears], known)) if on_shards else None
        hook(model, [m for m in roots if not isinstance(m, LoraLayer)], kepts, norms_of, shards)


def with_norms(layers: Iterable[Any]) -> Iterator[tuple[Any, nn.Linear, str, Dora]]:
    """Those of these modules whose norm is of W as it stands, with their base layer, active adapter and its variant."""
    for layer in layers:
        pair = active(layer) if type(layer) is Linear and reused(layer) and not layer.fan_in_fan_out else None
        base: Any = None if pair is None else layer._modules["base_layer"]
        if pair is not None and (type(base) is nn.Linear or family(base) == FP8):
            yield layer, base, *pair


def norms_of(layers: Iterable[Any]) -> Found:
    """Those of these modules whose norms can be computed together: KeptNorm, W, A, B and s of each."""
    found: Found = []
    for layer, _, name, variant in with_norms(layers):
        weights, s = weights_of(layer, name, variant), layer.scaling[name]
        if weights is None or isinstance(s, Tensor) or any(t.is_inference() for t in weights if isinstance(t, Tensor)):
            continue
        if select_backend(weights[0]).name == "triton":
            found.append((variant.kept, *weights, s))
    return found


def weights_of(layer: Any, name: str, variant: Any) -> tuple[Any, Tensor, Tensor] | None:
    """W, A and B as the layer will ask for their norm; under tensor parallelism those of this process."""
    base = layer._modules["base_layer"].weight
    if lies_on_mesh(base):
        mine = parts_of(base, *map(weight_of, modules_of(layer, name)))
        sliced = mine is None or any([cut.length >= 0 for cut in mine.cuts[:2]])  # others in each call
        return None if mine is None or sliced else mine.kept()
    w = variant.weights(layer, name)
    return None if isinstance(w, str) or (isinstance(w.W, QuantWeight) and not in_trees(w.W)) else (w.W, w.A, w.B)


def shards_of(layers: Iterable[Any], known: Container[int]) -> Found:
    """The same of layers that FSDP2 keeps in shards now: KeptNorm, and shards of W, A and B, and s.

    Asked in every forward, so of few attributes. ``known`` are ids of shards that lay in rows when they were listed before.
    """
    found: Found = []
    for layer, base, name, variant in with_norms(layers):
        if hooked(base):
            continue
        s = layer.scaling[name]
        modules = (base, layer._modules["lora_A"]._modules[name], layer._modules["lora_B"]._modules[name])
        shards: list[Any] = [module._parameters.get("weight") for module in modules]
        if all([id(t) in known or (t is not None and lies_in_rows(t)) for t in shards]) and not isinstance(s, Tensor):
            found.append((variant.kept, *shards, s))
    return found
