"""The layers of a model whose norms one call computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fdora.functional import select_backend
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import reused
from fdora.integrations._peft.linear import Linear, active
from fdora.integrations._shard import lies_in_rows
from fdora.quant import QuantWeight


def norms_of(model: nn.Module | None) -> list[tuple[Any, Tensor, Tensor, Tensor, float]]:
    """The layers of a model whose norms its hook can compute together: KeptNorm, W, A, B and s of each."""
    found: list[tuple[Any, Tensor, Tensor, Tensor, float]] = []
    layers: Any = () if model is None else model.modules()
    for layer in layers:
        pair = active(layer) if type(layer) is Linear and reused(layer) and not layer.fan_in_fan_out else None
        if pair is None or type(layer._modules["base_layer"]) is not nn.Linear:
            continue
        name, variant = pair
        w, s = variant.weights(layer, name), layer.scaling[name]
        if (
            isinstance(w, str)
            or isinstance(w.W, QuantWeight)
            or isinstance(s, Tensor)
            or any(t.is_inference() for t in (w.W, w.A, w.B))
            or select_backend(w.W).name != "triton"
        ):
            continue
        found.append((variant.kept, w.W, w.A, w.B, s))
    return found


def shards_of(model: nn.Module | None) -> list[tuple[Any, Any, Any, Any, float]]:
    """The same of layers that FSDP2 keeps in shards now: KeptNorm, and shards of W, A and B, and s."""
    found: list[tuple[Any, Any, Any, Any, float]] = []
    layers: Any = () if model is None else model.modules()
    for layer in layers:
        pair = active(layer) if type(layer) is Linear and reused(layer) and not layer.fan_in_fan_out else None
        base = None if pair is None else layer._modules["base_layer"]
        if pair is None or type(base) is not nn.Linear or hooked(base):
            continue
        W, A, B = base.weight, layer.lora_A[pair[0]].weight, layer.lora_B[pair[0]].weight
        if lies_in_rows(W, A, B) and not isinstance(layer.scaling[pair[0]], Tensor):
            found.append((pair[1].kept, W, A, B, layer.scaling[pair[0]]))
    return found
