"""The variants of each kind of layer that PEFT has: where W, A, B and m lie, and what composes y of the layer's two halves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import variants
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from fdora import FdoraError
from fdora._torch import PLAIN
from fdora.functional import dora_compose, dora_delta, dora_norm
from fdora.functional.prepared import kernel_rows
from fdora.integrations._peft.dora import Dora, other_norm, ours
from fdora.integrations._peft.fast_path import Weights, dtypes, obstacle, served
from fdora.integrations._peft.layer import fuse_layer
from fdora.integrations._peft.mesh import init_on_mesh, lies_on_mesh, put_magnitude
from fdora.integrations._peft.quantised import BNB4, BNB8, FP8, WeightCache, dont_pack, family, look, mend, misread, of_codes
from fdora.integrations._peft.sharded import gather, modules_of, weight_of
from fdora.quant import QuantWeight

BITSANDBYTES = ("Params4bit", "Int8Params")


class LinearVariant(Dora, variants.DoraLinearVariant):
    """nn.Linear, Conv1D, bitsandbytes, HQQ, torchao."""

    STOCK = variants.DoraLinearVariant

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        base = module.get_base_layer()
        if type(base) is nn.Linear and lies_on_mesh(base.weight):
            init_on_mesh(module, adapter_name)
        elif family(base) == FP8:
            init_on_codes(module, adapter_name)
        else:
            super().init(module, adapter_name, **kwargs)
        fuse_layer(module)
        self.keep(module)

    def keep(self, module: Any) -> None:
        base = module.get_base_layer()
        self.kept.make_room(None if module.fan_in_fan_out else getattr(base, "weight", None))
        self.held, self.base = WeightCache(), look(base, self.compute)
        dont_pack(base)
        mend(base)

    def ready(self, module: Any, adapter: str, *read: Any) -> Weights | str:
        """In a forward: what FSDP has sharded alone is gathered by a call of it."""
        return super().ready(module, adapter, gather)

    def weights(self, module: Any, adapter: str, read: Any = weight_of) -> Weights | str:
        base = module.get_base_layer()
        A, B, m = map(read, modules_of(module, adapter))
        if self.look(base)[0] or quantised(base):
            found: Any = self.quantised(base, A, B, m)
        else:
            W = base.weight
            found = (W, self.kept.frozen(W) if W.requires_grad and not W.is_leaf else W)
        if isinstance(found, str):
            return found
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
        if kind in (BNB4, BNB8, FP8):
            return W
        return base.W_q if hasattr(base, "W_q") else base.weight, dequantize_module_weight(base).detach()

    def fall_back(self, why: str, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.look(module.get_base_layer())[0] == FP8:
            raise FdoraError(
                f"fdora.use_fdora: a layer of 8-bit codes must run through fdora, got {why}. PEFT's own code would take the "
                "codes for the weight."
            )
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

    def composed(self, result: Tensor, lora: Tensor, g: Tensor, s: float, bias: Tensor | None) -> Tensor:
        return dora_compose(result, lora, g, s=s, bias=bias)

    def corrected(self, base: Any, w: Weights, x: Tensor, result: Tensor, rest: tuple[Any, ...]) -> Tensor:
        lora, g, s, bias = rest
        if isinstance(w.W, QuantWeight) or quantised(base):  # F.linear would keep the dequantised weight until backward
            delta = dora_delta(base(x), lora, g, s=s)
            return result + (delta if bias is None else delta + bias.to(delta.dtype))
        return result + dora_delta(F.linear(x, w.W), lora, g, s=s)


def init_on_codes(module: Any, name: str) -> None:
    """What PEFT's variant does when an adapter is made, which cannot compute with codes. PEFT gave A and B their dtype."""
    A, B = (part[name].float().weight for part in (module.lora_A, module.lora_B))
    put_magnitude(
        module, name, dora_norm(of_codes(module.get_base_layer()).to(A.device, A.dtype), A, B, s=float(module.scaling[name]))
    )


def fitting(A: Tensor, B: Tensor, m: Tensor) -> torch.dtype:
    """What a weight may stand for beside these adapters, where only its norm is asked for: that is of the weight as decoded."""
    return next((t.dtype for t in (A, B, m) if t.dtype != torch.float32), torch.float32)


def quantised(base: nn.Module) -> bool:
    """Whether PEFT's helper has a way to dequantise it."""
    if hasattr(base, "W_q"):
        return True
    kind = type(base.weight)
    return kind not in PLAIN and (kind.__name__ in BITSANDBYTES or kind.__module__.startswith("torchao."))


class Fused(Dora):
    """One whose layer takes fdora's forward when its adapter is made."""

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        super().init(module, adapter_name, **kwargs)
        fuse_layer(module)


class EmbeddingVariant(Fused, variants.DoraEmbeddingVariant):
    """nn.Embedding: W is (V, d) and the norm runs along V, so this is the linear layer of the transposed weight."""

    STOCK = variants.DoraEmbeddingVariant

    def drops(self, module: Any, adapter: str) -> bool:
        """It has dropout and does not use it."""
        return False

    def weights(self, module: Any, adapter: str) -> Weights | str:
        W = self.kept.frozen(module.get_base_layer().weight)
        A, B = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
        m = module.lora_magnitude_vector[adapter].weight
        return served(W, W.T if W.dim() == 2 else W, A, B, m)

    def compose(self, module: Any, active_adapter: str, w: Weights, x: Tensor, result: Tensor) -> Tensor:
        s = module.scaling[active_adapter]
        g, _ = self.scale_and_bias(module, w, s, result, None)
        lora = module._embed(x, w.A.T) @ w.B.T
        scale = module._get_embed_scale()  # Gemma's embeddings multiply their output
        if scale is not None:
            lora = lora * scale.to(lora.dtype)
        return dora_compose(result, lora, g, s=s)

    def rows(self, module: Any, v: Tensor, weight: Tensor) -> Tensor:
        return v.view(1, -1)


class ConvVariant(Fused):
    """nn.Conv1d, 2d, 3d: the linear layer of the flattened kernel. g lies along axis 1.

    With groups PEFT's norm is of no kernel at all: ours is of the one that the layer applies, see fdora/eager/conv.py.
    """

    def weights(self, module: Any, adapter: str, W: Any = None) -> Weights | str:
        base = module.get_base_layer()
        W = self.kept.frozen(base.weight) if W is None else W
        A, B, m = map(weight_of, modules_of(module, adapter))
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
        with other_norm(layer, lambda *_, **__: c):
            return super().fall_back(why, module, adapter, *args, **kwargs)

    def composed(self, result: Tensor, lora: Tensor, g: Tensor, s: float, bias: Tensor | None) -> Tensor:
        along = (1, -1, *[1] * (result.dim() - 2))
        g = g.view(along)
        y = g * result + (s * g) * lora
        return (y if bias is None else y + bias.view(along)).to(result.dtype)

    def corrected(self, base: Any, w: Weights, x: Tensor, result: Tensor, rest: tuple[Any, ...]) -> Tensor:
        lora, g, s, _ = rest
        g = g.view(1, -1, *[1] * (result.dim() - 2))
        conv = getattr(F, f"conv{result.dim() - 2}d")
        base_result = conv(x, base.weight, None, base.stride, base.padding, base.dilation, base.groups)
        return (result + (g - 1) * base_result + (s * g) * lora).to(result.dtype)


def own_norm(module: Any) -> bool:
    """Whether it has a norm of ours that is another than PEFT's."""
    return any(isinstance(v, ConvVariant) for v in ours(module)) and module.get_base_layer().groups > 1


OF_GROUPS = (
    "fdora.use_fdora: {} convolutions with groups, one of them `{}`, run with the norm of the kernel that "
    "they apply. PEFT's own norm is of no kernel: an adapter that PEFT trained gives other outputs now."
)


class Conv1dVariant(ConvVariant, variants.DoraConv1dVariant):
    STOCK = variants.DoraConv1dVariant


class Conv2dVariant(ConvVariant, variants.DoraConv2dVariant):
    STOCK = variants.DoraConv2dVariant


class Conv3dVariant(ConvVariant, variants.DoraConv3dVariant):
    STOCK = variants.DoraConv3dVariant


OURS: dict[type, type] = {
    kind.STOCK: kind for kind in (LinearVariant, EmbeddingVariant, Conv1dVariant, Conv2dVariant, Conv3dVariant)
}
