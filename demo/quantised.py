"""The encoder with its linear layers in NF4, as bitsandbytes keeps them: four bits and a nested scale for each weight."""

from __future__ import annotations

from typing import TypeVar

import bitsandbytes as bnb
from torch import nn
from transformers import PreTrainedModel

BLOCK = 64
Model = TypeVar("Model", bound=nn.Module)


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """In place; products stay in float32."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                made = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype, quant_type="nf4"
                )
                made.weight = bnb.nn.Params4bit(layer.weight.data, blocksize=BLOCK, quant_type="nf4", module=made)
                made.bias = layer.bias
                setattr(parent, name, made.to(layer.weight.device))
    model.is_loaded_in_4bit = True  # by which PEFT knows such a model
    return never_packed(model)


def never_packed(model: Model) -> Model:
    """In evaluation mode on a CPU a Linear4bit packs its weight anew, in place, and bitsandbytes' own dequantisation, which
    PEFT's norm is made from, reads it wrongly then (0.50). A layer without dropout may as well be in training mode.
    """
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.train()
    return model


def weight_bytes(model: nn.Module) -> int:
    """What the weights of the linear layers take, scales included."""
    found = 0
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            state = layer.weight.quant_state
            tensors = [layer.weight, state.absmax, state.state2.absmax, state.state2.code, state.offset]
            found += sum(t.numel() * t.element_size() for t in tensors)
        elif isinstance(layer, nn.Linear):
            found += layer.weight.numel() * layer.weight.element_size()
    return found
