"""DoRA on every linear layer of a model: with fdora's functions in a few lines, and the same start in PEFT.

fdora brings no modules. A layer keeps its weight; its forward becomes one call of :func:`fdora.functional.dora_linear`
on that weight and three new tensors, which live in a plain dict.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Generator, nn
from transformers import PreTrainedModel

from fdora.functional import DoraParams, dora_init, dora_linear
from fdora.quant import from_bnb


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def adapt(model: nn.Module, r: int, s: float, generator: Generator) -> dict[str, DoraParams]:
    """Adapt the linear layers of a frozen model in place; returns what is to be trained."""
    params = {}
    for name, layer in linear_layers(model).items():
        W = layer.weight if type(layer) is nn.Linear else from_bnb(layer.weight)
        p = params[name] = DoraParams(*(t.requires_grad_() for t in dora_init(W, r, generator=generator)))
        layer.forward = partial(dora_linear, W=W, A=p.A, B=p.B, m=p.m, s=s, bias=layer.bias)
    return params


def peft_twin(model: PreTrainedModel, params: dict[str, DoraParams], r: int, alpha: float) -> PeftModel:
    """The same model under PEFT's DoRA, its adapters filled with a copy of ``params``."""
    config = LoraConfig(use_dora=True, r=r, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(params))
    with warnings.catch_warnings():  # PEFT 0.21 asks transformers 5 by an old name
        warnings.simplefilter("ignore", FutureWarning)
        twin = get_peft_model(model, config)
    with torch.no_grad():
        for name, p in params.items():
            layer = twin.base_model.model.get_submodule(name)
            layer.lora_A["default"].weight.copy_(p.A)
            layer.lora_B["default"].weight.copy_(p.B)
            layer.lora_magnitude_vector["default"].weight.copy_(p.m)
    return twin.eval()
