"""What can happen to a frozen weight between two calls of a PEFT model, behind the back of whoever keeps its norm."""

from torch import nn


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
