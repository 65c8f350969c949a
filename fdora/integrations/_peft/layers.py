"""A whole DoRA embedding or convolution in one call, as linear.py has it for linear layers."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import dora
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from fdora._torch import PLAIN, is_traced
from fdora.functional import dora_conv1d, dora_conv2d, dora_conv3d, dora_embedding
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import FUSED, Dora, Weights
from fdora.integrations._peft.linear import OURS, Layer, active, note

CONV: tuple[Any, ...] = (dora_conv1d, dora_conv2d, dora_conv3d)
BASE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAGNITUDE = (dora.DoraConv1dLayer, dora.DoraConv2dLayer, dora.DoraConv3dLayer)


class Embedding(Layer, lora.Embedding):
    """PEFT's ``lora.Embedding``. It has dropout and does not use it."""

    STOCK = lora.Embedding

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, Layer):  # bound methods outlive unfuse_layer
            return type(self).forward(self, x, *args, **kwargs)
        module: Any = self
        found = None if args or kwargs else active(module, module.lora_embedding_A)
        if found is None:
            return lora.Embedding.forward(self, x, *args, **kwargs)
        name, variant = found
        base = module.base_layer
        w = not_looked_up(module, base, module.lora_magnitude_vector[name]) or fitting(
            x, variant, module, name, (torch.int64, torch.int32)
        )
        if isinstance(w, str):
            note(variant, w)
            return lora.Embedding.forward(self, x)
        variant.count(FUSED)
        s = module.scaling[name]
        c = variant.with_gradient(variant.norm(w, s), w.W, w.A, w.B, s)
        how = {"padding_idx": base.padding_idx, "sparse": base.sparse}
        return dora_embedding(x, variant.kept.frozen(base.weight), w.A, w.B, w.m, s=s, norm=c, **how)


def not_looked_up(module: Any, base: Any, magnitude: Any) -> str:
    """Why more happens in this embedding than rows being read."""
    if type(base) is not nn.Embedding:
        return f"a {type(base).__name__} in the place of a torch.nn.Embedding"
    if type(magnitude) is not dora.DoraEmbeddingLayer or hooked(magnitude) or hooked(base):
        return "hooks on the layer's parts"
    if base.max_norm is not None:
        return "max_norm, which rewrites the base weight"
    if base.scale_grad_by_freq:
        return "gradients divided by frequency"
    if base.sparse and is_traced():
        return "sparse gradients under torch.compile or torch.func"
    return "tensor parallel" if getattr(module, "tp_layer", None) is not None else ""


class Conv(Layer):
    """PEFT's ``lora.Conv1d``, 2d and 3d."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, Layer):
            return type(self).forward(self, x, *args, **kwargs)
        stock = type(self).STOCK
        found = None if args or kwargs else active(self)
        if found is None:
            return stock.forward(self, x, *args, **kwargs)
        name, variant = found
        base: Any = self._modules["base_layer"]
        n = base.weight.dim() - 2
        w = not_convolved(self, name, base, n) or fitting(x, variant, self, name, dtypes_of(base.weight))
        if not isinstance(w, str) and x.dim() not in (n + 1, n + 2):
            w = "an input of another number of axes"
        if isinstance(w, str):
            note(variant, w)
            return stock.forward(self, x)
        variant.count(FUSED)
        parts: Any = self
        s, W = parts.scaling[name], variant.kept.frozen(base.weight)
        c = variant.with_gradient(variant.norm(w, s), w.W, w.A, w.B, s)
        return CONV[n - 1](
            x,
            W,
            parts.lora_A[name].weight,
            parts.lora_B[name].weight,
            w.m,
            s=s,
            bias=base.bias,
            norm=c,
            stride=base.stride,
            padding=base.padding,
            dilation=base.dilation,
            groups=base.groups,
        )


def not_convolved(module: Any, name: str, base: Any, n: int) -> str:
    """Why more, or something else, happens in this layer than three convolutions with one geometry."""
    lora_A, lora_B, magnitude = (part[name] for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector))
    for part in (base, lora_A, lora_B):
        if type(part) is not BASE[n - 1]:
            return f"a {type(part).__name__} in the place of a torch.nn.Conv{n}d"
        if hooked(part):
            return "hooks on the layer's parts"
    if type(magnitude) is not MAGNITUDE[n - 1] or hooked(magnitude):
        return "hooks on the layer's parts"
    if base.padding_mode != "zeros":
        return "a padding mode, which PEFT's adapter does not have"
    if lora_A.stride != base.stride or lora_A.padding != base.padding or lora_A.bias is not None or lora_B.bias is not None:
        return "an adapter with a geometry or a bias of its own"
    dropout = module.lora_dropout[name]
    return "dropout with torch's mask" if module.training and type(dropout) is not nn.Identity else ""


def dtypes_of(W: Tensor) -> tuple[torch.dtype, ...]:
    """What a convolution of this weight takes."""
    if not W.is_meta and torch.is_autocast_enabled(W.device.type):
        return (torch.float16, torch.bfloat16, torch.float32)
    return (W.dtype,)


def fitting(x: Any, variant: Dora, module: Any, name: str, wanted: tuple[torch.dtype, ...]) -> Weights | str:
    """The weights, if fdora's functions take them and x."""
    if type(x) not in PLAIN:
        return f"the input is a {type(x).__name__}"
    w = variant.ready(module, name)
    if isinstance(w, str):
        return w
    if x.device != w.W.device:
        return "the input is on another device"
    return w if x.dtype in wanted else f"a {x.dtype} input for a {w.W.dtype} base weight"


class Conv1d(Conv, lora.Conv1d):
    STOCK = lora.Conv1d


class Conv2d(Conv, lora.Conv2d):
    STOCK = lora.Conv2d


class Conv3d(Conv, lora.Conv3d):
    STOCK = lora.Conv3d


OURS.update({kind.STOCK: kind for kind in (Embedding, Conv1d, Conv2d, Conv3d)})
