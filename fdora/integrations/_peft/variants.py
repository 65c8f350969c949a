"""What one DoRA adapter adds to one layer, in PEFT's own slot for that: ``layer.lora_variant[adapter]``.

PEFT hands over ``result``, the base layer's output with its bias. With h = g (1 - g for the bias) that is enough:

    y = g (result - bias) + bias + g s lora = compose(result, lora, g, s, (1 - g) bias)

Initialisation, merge and checkpoint keys stay PEFT's. What cannot be served goes to the stock variant, and is counted.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import variants
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from fdora._torch import PLAIN
from fdora.functional import dora_compose, dora_delta, dora_norm, dora_scale
from fdora.functional.prepared import kernel_rows
from fdora.integrations._peft import layers as layers  # fuse_layer knows its classes
from fdora.integrations._peft.dora import Dora, Weights, dtypes, obstacle, paused, reused, served
from fdora.integrations._peft.linear import fuse_layer
from fdora.integrations._peft.mesh import init_on_mesh, lies_on_mesh
from fdora.integrations._peft.quant import BNB4, BNB8, Held, dont_pack, family, look, mend, misread
from fdora.integrations._peft.sharded import gather, weight_of
from fdora.quant import QuantWeight

BITSANDBYTES = ("Params4bit", "Int8Params")


class LinearVariant(Dora, variants.DoraLinearVariant):
    """nn.Linear, Conv1D, bitsandbytes, HQQ, torchao."""

    STOCK = variants.DoraLinearVariant

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        base = module.get_base_layer()
        if type(base) is nn.Linear and lies_on_mesh(base.weight):
            init_on_mesh(module, adapter_name)
        else:
            super().init(module, adapter_name, **kwargs)
        fuse_layer(module)
        self.keep(module)

    def keep(self, module: Any) -> None:
        base = module.get_base_layer()
        self.kept.make_room(None if module.fan_in_fan_out else getattr(base, "weight", None))
        self.held, self.base = Held(), look(base)
        dont_pack(base)
        mend(base)

    def ready(self, module: Any, adapter: str) -> Weights | str:
        """In a forward: what FSDP has sharded alone is gathered by a call of it."""
        return paused(module.lora_magnitude_vector[adapter], module.scaling[adapter]) or self.weights(module, adapter, gather)

    def weights(self, module: Any, adapter: str, read: Any = weight_of) -> Weights | str:
        base = module.get_base_layer()
        A, B, m = (read(part[adapter]) for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector))
        if self.look(base)[0] or quantised(base):
            found: Any = self.quantised(base, A, B, m)
        else:
            W = base.weight
            found = (W, self.kept.frozen(W) if W.requires_grad and not W.is_leaf else W)
        why = found if isinstance(found, str) else obstacle(found[1], A, B, m)
        if why:
            return why
        owner, W = found
        transposed = getattr(module, "fan_in_fan_out", False) and isinstance(W, Tensor) and W.dim() == 2
        return served(owner, W.T if transposed else W, A, B, m)

    def quantised(self, base: Any, A: Tensor, B: Tensor, m: Tensor) -> tuple[Any, Any] | str:
        """What the base weight is made from, and the weight: dense where fdora knows no such format, but PEFT does."""
        why, kind = obstacle(A, B, m), self.look(base)[0]
        if why:
            return why
        W = self.held.of(base, kind, fitting(A, B, m)) if kind else ""
        if isinstance(W, QuantWeight):
            return W.tensors[0], W
        if kind in (BNB4, BNB8):
            return W
        return base.W_q if hasattr(base, "W_q") else base.weight, dequantize_module_weight(base).detach()

    def fall_back(self, why: str, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return super().fall_back(why, module, *args, **kwargs)
        finally:
            mend(module.get_base_layer())

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return super().merge_safe(module, active_adapter, self.read(module, orig_weight))

    def unmerge(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return super().unmerge(module, active_adapter, self.read(module, orig_weight))

    def misread(self, module: Any) -> QuantWeight | None:
        """The base weight as it is, where bitsandbytes, and so PEFT, reads another."""
        base = module.get_base_layer()
        W = self.held.of(base, BNB4) if family(base) == BNB4 else None
        return W if isinstance(W, QuantWeight) and misread(base, W) else None

    def read(self, module: Any, orig_weight: Tensor) -> Tensor:
        W = self.misread(module)
        return orig_weight if W is None else W.dequantize(orig_weight.dtype)

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        s, base = module.scaling[active_adapter], module.get_base_layer()
        lora_A, lora_B, dropout = (part[active_adapter] for part in (module.lora_A, module.lora_B, module.lora_dropout))
        g, bias = scale_and_bias(self, module, w, s, result, base.bias)
        if isinstance(dropout, nn.Identity) or not module.training:
            return dora_compose(result, lora_B(lora_A(x)), g, s=s, bias=bias)
        x = dropout(x)
        lora, x = lora_B(lora_A(x)), x.to(result.dtype)
        if isinstance(w.W, QuantWeight) or quantised(base):  # F.linear would keep the dequantised weight until backward
            delta = dora_delta(base(x), lora, g, s=s)
            return result + (delta if bias is None else delta + bias.to(delta.dtype))
        return result + dora_delta(F.linear(x, w.W), lora, g, s=s)


def scale_and_bias(
    variant: Dora, module: Any, w: Weights, s: float, result: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """g, and (1 - g) bias: what is left to add where result has the bias in it already."""
    if reused(module):
        c = variant.norm(w, s)
    else:
        c = dora_norm(w.W, w.A, w.B, s=s)
        if not torch.compiler.is_compiling():
            variant.kept.drop()
    c = variant.with_gradient(c, w.W, w.A, w.B, s)
    g = dora_scale(w.m, c).to(torch.promote_types(result.dtype, torch.float32))
    if bias is None:
        return g, None
    g = torch.where(c == 0, 0, g)  # such a row is its bias; a large g would cancel against 1 - g
    return g, (1 - g) * bias


def fitting(A: Tensor, B: Tensor, m: Tensor) -> torch.dtype:
    """What a weight may stand for beside these adapters, where only its norm is asked for: that is of the weight as decoded."""
    return next((t.dtype for t in (A, B, m) if t.dtype != torch.float32), torch.float32)


def quantised(base: nn.Module) -> bool:
    """Whether PEFT's helper has a way to dequantise it."""
    if hasattr(base, "W_q"):
        return True
    kind = type(base.weight)
    return kind not in PLAIN and (kind.__name__ in BITSANDBYTES or kind.__module__.startswith("torchao."))


class EmbeddingVariant(Dora, variants.DoraEmbeddingVariant):
    """nn.Embedding: W is (V, d) and the norm runs along V, so this is the linear layer of the transposed weight."""

    STOCK = variants.DoraEmbeddingVariant

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        super().init(module, adapter_name, **kwargs)
        fuse_layer(module)

    def weights(self, module: Any, adapter: str) -> Weights | str:
        W = self.kept.frozen(module.get_base_layer().weight)
        A, B = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
        m = module.lora_magnitude_vector[adapter].weight
        return obstacle(W, A, B, m) or served(W, W.T if W.dim() == 2 else W, A, B, m)

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        s = module.scaling[active_adapter]
        g, _ = scale_and_bias(self, module, w, s, result, None)
        lora = module._embed(x, w.A.T) @ w.B.T
        scale = module._get_embed_scale()  # Gemma's embeddings multiply their output
        if scale is not None:
            lora = lora * scale.to(lora.dtype)
        return dora_compose(result, lora, g, s=s)

    def rows(self, module: Any, v: Tensor, weight: Tensor) -> Tensor:
        return v.view(1, -1)


class Conv(Dora):
    """nn.Conv1d, 2d, 3d: the linear layer of the flattened kernel. g lies along axis 1.

    With groups PEFT's norm is of no kernel at all: ours is of the one that the layer applies, see fdora/eager/conv.py.
    """

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        super().init(module, adapter_name, **kwargs)
        fuse_layer(module)

    def weights(self, module: Any, adapter: str, W: Any = None) -> Weights | str:
        base = module.get_base_layer()
        W = self.kept.frozen(base.weight) if W is None else W
        A, B = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        m = module.lora_magnitude_vector[adapter].weight
        why = obstacle(W, A, B, m) or dtypes(W, A, B, m)
        if why or not W.dim() == A.dim() == B.dim():
            return why or "parameters of other shapes (sharded)"
        G = base.groups
        if A.shape[2:] != W.shape[2:] or A.shape[1] != G * W.shape[1] or B.shape[:2] != (W.shape[0], A.shape[0] // G):
            return "parameters of other shapes (sharded)"
        return served(W, *kernel_rows(W, A, B, G), m.flatten())

    def fall_back(self, why: str, module: Any, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        base = module.get_base_layer()
        w = self.weights(module, adapter, base.weight.detach()) if base.groups > 1 else ""
        if isinstance(w, str):
            return super().fall_back(why, module, adapter, *args, **kwargs)
        layer: Any = module.lora_magnitude_vector[adapter]
        W: Any = w.W
        c = torch.linalg.vector_norm(W + module.scaling[adapter] * (w.B @ w.A), dim=1).view(layer.weight.shape)
        layer.get_weight_norm = lambda *_, **__: c
        try:
            return super().fall_back(why, module, adapter, *args, **kwargs)
        finally:
            del layer.get_weight_norm

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        s, base = module.scaling[active_adapter], module.get_base_layer()
        lora_A, lora_B, dropout = (part[active_adapter] for part in (module.lora_A, module.lora_B, module.lora_dropout))
        g, bias = scale_and_bias(self, module, w, s, result, base.bias)
        along = (1, -1, *[1] * (result.dim() - 2))
        g = g.view(along)
        if isinstance(dropout, nn.Identity) or not module.training:
            y = g * result + (s * g) * lora_B(lora_A(x))
            return (y if bias is None else y + bias.view(along)).to(result.dtype)
        x = dropout(x)
        lora, x = lora_B(lora_A(x)), x.to(result.dtype)
        conv = getattr(F, f"conv{result.dim() - 2}d")
        base_result = conv(x, base.weight, None, base.stride, base.padding, base.dilation, base.groups)
        return (result + (g - 1) * base_result + (s * g) * lora).to(result.dtype)


def own_norm(module: Any) -> bool:
    """Whether it has a norm of ours that is another than PEFT's."""
    return any(isinstance(v, Conv) for v in module.lora_variant.values()) and module.get_base_layer().groups > 1


def warn_of_groups(count: int, example: str) -> None:
    warnings.warn(
        f"fdora.use_fdora: {count} convolutions with groups, one of them `{example}`, run with the norm of the kernel that "
        "they apply. PEFT's own norm is of no kernel: an adapter that PEFT trained gives other outputs now.",
        stacklevel=3,
    )


class Conv1dVariant(Conv, variants.DoraConv1dVariant):
    STOCK = variants.DoraConv1dVariant


class Conv2dVariant(Conv, variants.DoraConv2dVariant):
    STOCK = variants.DoraConv2dVariant


class Conv3dVariant(Conv, variants.DoraConv3dVariant):
    STOCK = variants.DoraConv3dVariant


OURS: dict[type, type] = {
    kind.STOCK: kind for kind in (LinearVariant, EmbeddingVariant, Conv1dVariant, Conv2dVariant, Conv3dVariant)
}
