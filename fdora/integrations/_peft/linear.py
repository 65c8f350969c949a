"""A whole DoRA layer in one call of :func:`fdora.functional.dora_linear`, instead of the base layer and then a correction.

The layer's class is exchanged for a subclass, and back: nothing is added to the instance, so deepcopy, pickle, DataParallel
and torch.compile see an ordinary module. What the one call does not serve runs PEFT's forward, and so our variant.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.lora import torchao
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora._torch import functorch_active, in_subgraph
from fdora.functional import DoraLayer, dora_linear, prepared, select_backend
from fdora.functional.prepared import linears
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import FUSED, Dora, forget, paused, release
from fdora.integrations._peft.mesh import lies_on_mesh, on_mesh
from fdora.integrations._peft.mixed import mixed
from fdora.integrations._peft.quant import compute_dtype
from fdora.integrations._peft.sharded import LISTENED, leaf, listened
from fdora.integrations._peft.steady import Call, keep_route, norms_of, ready
from fdora.integrations._peft.torchao import Merging
from fdora.integrations._peft.verdict import verdict


class Layer(nn.Module):
    """Comes before PEFT's own class, whose name and parameters it has: the short way first."""

    STOCK: Any
    lora_variant: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (args or kwargs or torch.compiler.is_dynamo_compiling() or functorch_active()):
            known = ready((self,), x)
            if known is not None:
                return prepared.call(*known)[0]
        if not isinstance(self, Layer):  # bound methods outlive unfuse_layer
            return type(self).forward(self, x, *args, **kwargs)
        stock = type(self).STOCK
        if args or kwargs:
            named = kwargs.keys() == {"adapter_names"} and not args
            out = mixed(self, x, kwargs["adapter_names"], call_of) if named else ""
            return stock.forward(self, x, *args, **kwargs) if isinstance(out, str) else out
        found = active(self)
        if found is None:
            return stock.forward(self, x)
        traced, shared = torch.compiler.is_compiling() or functorch_active(), found[1].shared
        if shared is not None and not (traced and torch.compiler.is_dynamo_compiling() and in_subgraph()):
            y = shared.output(self, x, found[1].place, traced)
            if y is not None:
                return y
        call = call_of(self, x, *found)
        why, backend = (call, "") if isinstance(call, str) else verdict(x, (call,))
        if why is LISTENED and lies_on_mesh(self._modules["base_layer"].weight):  # type: ignore[union-attr]
            y_or_why = on_mesh(self, *found, x)
            if not isinstance(y_or_why, str):
                found[1].count(FUSED)
                return y_or_why
            why = y_or_why
        if why or isinstance(call, str):
            note(found[1], why)
            return stock.forward(self, x)
        variant, keep_inner = call.variant, call.variant.keep_inner
        ends = None if variant.tail is None else call.ends(self, x)
        if backend and ends is None:
            keep_route(self, call)
        variant.count(FUSED)
        _, W, A, B, m, bias, s, p, dtype = call
        x, given = (x if dtype is None else x.to(dtype)), x.dtype
        if ends is not None:
            variant.tail.taken()
            end = {"gamma": ends.gamma, "residual": ends.residual}
            return dora_linear(x, W, A, B, m, s=s, bias=bias, norm=call.norm(), keep_inner=keep_inner, **end)
        if variant.detach:
            y = linears(x, (DoraLayer(W, A, B, m, s, bias, norms_of((call,))[0]),), p, keep_inner)[0]
        else:  # one node, which takes the gradient on through the norm
            how: Any = {"dropout_p": p, "dropout_mode": "peft", "keep_inner": keep_inner, "detach": False}
            y = dora_linear(x, W, A, B, m, s=s, bias=bias, norm=call.value(), **how)
        return y if dtype is None else y.to(given)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """The base weight will not come back bit for bit, whichever adapter it was."""
        stock: Any = super()
        stock.merge(*args, **kwargs)
        forget(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        forget(self)
        if torch.__future__.get_swap_module_params_on_conversion():  # the base layer's turn comes after this
            release(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The weight may be elsewhere now, or another: ``model.to``."""
        release(self)
        super()._apply(*args, **kwargs)
        for variant in self.lora_variant.values():
            if isinstance(variant, Dora):
                variant.keep(self)
        return self


class Linear(Layer, lora.Linear):
    """PEFT's ``lora.Linear``."""

    STOCK = lora.Linear


class TorchaoLoraLinear(Layer, Merging):
    """PEFT's, which merges as it computes."""

    STOCK = torchao.TorchaoLoraLinear


LAZY = {
    ("peft.tuners.lora.bnb", "Linear4bit"),
    ("peft.tuners.lora.bnb", "Linear8bitLt"),
    ("peft.tuners.lora.hqq", "HqqLoraLinear"),
}


class Lazy(Layer):
    """One of these: PEFT has the class only where the package of its base layer is installed."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return blank, (self.STOCK,), self.__dict__


@cache
def lazy(stock: Any) -> Any:
    bases: Any = (Lazy, stock)
    return type(stock.__name__, bases, {"STOCK": stock, "__module__": stock.__module__})


def blank(stock: Any) -> Any:
    cls = lazy(stock)
    return cls.__new__(cls)


def active(module: Any, of: Any = None) -> tuple[str, Dora] | None:
    """The one adapter that is active, and its variant; None where PEFT's forward has to run. ``of``: all adapters."""
    if module._disable_adapters or module.merged_adapters:
        return None
    adapters, named = module._modules["lora_A"]._modules if of is None else of, module._active_adapter
    if type(named) is list and len(named) == 1:
        named = named[0]
    if type(named) is str and named in adapters:
        variant = module.lora_variant.get(named)
        if isinstance(variant, Dora):
            return named, variant
    names = ([named] if named in adapters else []) if type(named) is str else [name for name in named if name in adapters]
    variant = module.lora_variant.get(names[0]) if len(names) == 1 else None
    if not isinstance(variant, Dora):
        for name in names:
            note(module.lora_variant.get(name), "several active adapters")
        return None
    return names[0], variant


def note(variant: Any, why: str) -> None:
    if isinstance(variant, Dora) and not torch.compiler.is_compiling():
        variant.why_not_fused = why


def call_of(module: Any, x: Tensor, name: str, variant: Dora) -> Call | str:
    """The one call, but for what :func:`verdict` says of its tensors; or why it is not made."""
    parts = module._modules  # an attribute of a module costs ten times a look into its dict
    base, lora_A, lora_B, magnitude, dropout = (
        parts["base_layer"],
        parts["lora_A"]._modules[name],
        parts["lora_B"]._modules[name],
        parts["lora_magnitude_vector"]._modules[name],
        parts["lora_dropout"]._modules[name],
    )
    kind, why = variant.look(base)
    if type(base) is not nn.Linear and not kind:  # another quantised layer, a wrapper that shards
        return f"a {type(base).__name__} in the place of a torch.nn.Linear"
    sharded = hooked(base)
    if sharded and listened(base):
        return LISTENED
    if why:
        return why
    leaves: Any = lora_A, lora_B, magnitude
    if type(lora_A) is not nn.Linear or type(lora_B) is not nn.Linear or any([hooked(part) for part in leaves]) or sharded:
        sharded = True
        leaves = [leaf(part, of) for part, of in zip(leaves, (nn.Linear, nn.Linear, DoraLinearLayer), strict=True)]
        why = next((each for each in leaves if isinstance(each, str)), "")
        if why:
            return why
        magnitude = leaves[2].inner
    elif type(magnitude) is not DoraLinearLayer:
        return LISTENED
    p = 0.0
    if type(dropout) is not nn.Identity and module.training:
        if not draws(dropout, x):
            return "dropout with torch's mask"
        p = dropout.p if dropout.training else 0.0
    if module.fan_in_fan_out:
        return "a transposed base weight"
    s = module.scaling[name]
    why = paused(magnitude, s)
    if why:
        return why
    if sharded:
        A, B, m = [each.weight() for each in leaves]
    else:
        A, B, m = [part._parameters.get("weight") for part in leaves]
        if A is None or B is None or m is None:  # FSDP1 holds views of its flat parameter in their places
            A, B, m = [part.weight for part in leaves]
    if not kind:
        W, bias = base._parameters.get("weight"), base._parameters.get("bias")
        if W is None or sharded:
            W, bias = base.weight, base.bias
        if W.requires_grad and not W.is_leaf:
            W = variant.kept.frozen(W)
        return Call(variant, W, A, B, m, bias, s, p)
    dtype = compute_dtype(base, kind, x)
    quant = variant.held.of(base, kind, dtype)
    if isinstance(quant, str):
        return quant
    if m.dtype not in (torch.float32, quant.dtype):  # PEFT takes it from a weight of the state's dtype
        m = m.float()
    return Call(variant, quant, A, B, m, base.bias, s, p, dtype)


def draws(dropout: nn.Module, x: Tensor) -> bool:
    """Whether kernels draw the mask: no dropped copy of x, no stored mask. Elsewhere PEFT's own module is the faster way."""
    return type(dropout) is nn.Dropout and dropout.p < 1 and not hooked(dropout) and select_backend(x).name == "triton"


def fuse_layer(module: Any) -> None:
    kind: Any = type(module)
    if not isinstance(module, Layer):
        module.__class__ = lazy(kind) if (kind.__module__, kind.__name__) in LAZY else OURS.get(kind, kind)


def unfuse_layer(module: Any) -> None:
    if isinstance(module, Layer):
        module.__class__ = module.STOCK


OURS: dict[type, Any] = {lora.Linear: Linear, torchao.TorchaoLoraLinear: TorchaoLoraLinear}
