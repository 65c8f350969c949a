"""A PEFT model, and what can happen to a frozen weight of it between two calls, behind the back of whoever keeps its norm."""

import torch
from torch import nn

from tests import device
from tests.triton.marks import HALF


def adapted(base, targets, **config):
    """With DoRA, its adapters in half precision too."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, use_dora=True, target_modules=targets, **config)
    return moved(get_peft_model(base.to(device.NAME, HALF[0]), config, autocast_adapter_dtype=False))


@torch.no_grad()
def moved(model):
    """Adapters away from their start."""
    for name, p in model.named_parameters():
        if "lora" in name:
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def times(t, by):
    """Of 8-bit codes, too."""
    return (by * t.float()).to(t.dtype)


def new_weight(layer, by=3):
    """Another Parameter, in memory of its own."""
    layer.base_layer.weight = nn.Parameter(times(layer.base_layer.weight.detach(), by), requires_grad=False)


def same_memory(layer, by=3):
    """Another Parameter with other values, at the address and of the version of the one before."""
    old = layer.base_layer.weight
    old.data.mul_(by)
    layer.base_layer.weight = new = nn.Parameter(old.data, requires_grad=False)
    while new._version < old._version:
        new.add_(0)
    assert (old.data_ptr(), old._version) == (new.data_ptr(), new._version)


def merged(model, layer):
    """Written while it held the merged weight."""
    model.merge_adapter()
    layer.base_layer.weight.data.mul_(2)
    model.unmerge_adapter()
