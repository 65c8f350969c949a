"""The layers of a model whose norms one call computes."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor, nn

from fdora.functional import select_backend
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import reused
from fdora.integrations._peft.linear import Linear, active
from fdora.integrations._peft.mesh import lies_on_mesh
from fdora.integrations._peft.parts import parts_of
from fdora.integrations._shard import lies_in_rows
from fdora.quant import QuantWeight


def norms_of(layers: Iterable[Any]) -> list[tuple[Any, Tensor, Tensor, Tensor, float]]:
    """Those of these modules whose norms can be computed together: KeptNorm, W, A, B and s of each."""
    found: list[tuple[Any, Tensor, Tensor, Tensor, float]] = []
    for layer in layers:
        pair = active(layer) if type(layer) is Linear and reused(layer) and not layer.fan_in_fan_out else None
        if pair is None or type(layer._modules["base_layer"]) is not nn.Linear:
            continue
        name, variant = pair
        weights, s = weights_of(layer, name, variant), layer.scaling[name]
        if (
            weights is None
            or isinstance(s, Tensor)
            or any(t.is_inference() for t in weights)
            or select_backend(weights[0]).name != "triton"
        ):
            continue
        found.append((variant.kept, *weights, s))
    return found


def weights_of(layer: Any, name: str, variant: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """W, A and B as the layer will ask for their norm; under tensor parallelism those of this process."""
    base = layer._modules["base_layer"].weight
    if lies_on_mesh(base):
        parts = parts_of(base, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_magnitude_vector[name].weight)
        sliced = parts is None or any([cut.length >= 0 for cut in parts.cuts[:2]])  # others in each call
        return None if parts is None or sliced else parts.kept()
    w = variant.weights(layer, name)
    return None if isinstance(w, str) or isinstance(w.W, QuantWeight) else (w.W, w.A, w.B)


def shards_of(layers: Iterable[Any], known: Container[int]) -> list[tuple[Any, Any, Any, Any, float]]:
    """The same of layers that FSDP2 keeps in shards now: KeptNorm, and shards of W, A and B, and s.

    Asked in every forward, so of few attributes. ``known`` are ids of shards that lay in rows when they were listed before.
    """
    found: list[tuple[Any, Any, Any, Any, float]] = []
    for layer in layers:
        pair = active(layer) if type(layer) is Linear and reused(layer) and not layer.fan_in_fan_out else None
        base = None if pair is None else layer._modules["base_layer"]
        if pair is None or type(base) is not nn.Linear or hooked(base):
            continue
        name, s = pair[0], layer.scaling[pair[0]]
        parts = (base, layer._modules["lora_A"]._modules[name], layer._modules["lora_B"]._modules[name])
        W, A, B = shards = [part._parameters.get("weight") for part in parts]
        if all([id(t) in known or (t is not None and lies_in_rows(t)) for t in shards]) and not isinstance(s, Tensor):
            found.append((pair[1].kept, W, A, B, s))
    return found
