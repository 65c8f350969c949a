"""What a layer is called with: one adapter, or several in one batch; and why that is no call of fdora's functions.

Batches of several adapters (``adapter_names=``) are one call of dora_linear_multi (:func:`mixed`). PEFT serves plain LoRA
there, no DoRA. The bank is stacked for every call from the adapters that the batch names.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora._records import DropoutMode, acc_dtype
from fdora.functional import DoraParams, dora_linear_multi, dora_stack, select_backend
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import Dora, paused
from fdora.integrations._peft.fast_path import Call, unfit
from fdora.integrations._peft.quantised import FP8, compute_dtype, decoded
from fdora.integrations._peft.sharded import LISTENED, leaf, listened

NO_DROPOUT: DropoutMode = "lora"


def active(module: Any, of: Any = None) -> tuple[str, Dora] | None:
    """The one adapter that is active, and its variant; None where PEFT's forward has to run. ``of``: all adapters."""
    if module._disable_adapters or module.merged_adapters:
        return None
    adapters, named = module._modules["lora_A"]._modules if of is None else of, module._active_adapter
    names = [name for name in ([named] if type(named) is str else named) if name in adapters]
    variants = [module.lora_variant.get(name) for name in names]
    if len(names) == 1 and isinstance(variants[0], Dora):
        return names[0], variants[0]
    for variant in variants:
        note(variant, "several active adapters")
    return None


def note(variant: Any, why: str) -> None:
    if isinstance(variant, Dora) and not torch.compiler.is_compiling():
        variant.why_not_fused = why


def call_of(module: Any, x: Tensor, name: str, variant: Dora) -> Call | str:
    """The one call, but for what :func:`eligibility` says of its tensors; or why it is not made."""
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
    p, mode = 0.0, NO_DROPOUT
    if type(dropout) is not nn.Identity and module.training:
        if not (draws(dropout, x) or (kind == FP8 and drawable(dropout))):  # the base's own product may be that of a GPU alone
            return "dropout with torch's mask"
        if dropout.training and dropout.p:
            p, mode = dropout.p, variant.dropout_mode
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
        return Call(variant, W, A, B, m, bias, s, p, mode)
    return quantised(x, base, kind, Call(variant, kind, A, B, m, base.bias, s, p, mode))  # type: ignore[arg-type]


def quantised(x: Tensor, base: Any, kind: str, call: Call) -> Call | str:
    """The call, with the weight of a base layer of this kind."""
    variant, _, A, B, m, bias, s, p, mode, *_ = call
    dtype = compute_dtype(base, kind, x)
    quant = variant.held.of(base, kind, x.dtype if kind == FP8 else dtype, variant.transposed)
    if isinstance(quant, str):
        return quant
    if m.dtype not in (torch.float32, quant.dtype):  # PEFT takes it from a weight of the state's dtype
        m = m.float()
    compute = computed(variant, decoded(quant, x, mode)) if variant.compute else None
    return Call(variant, quant, A, B, m, bias, s, p, mode, dtype, compute)  # Dynamo of torch 2.8 does not trace _replace


def computed(variant: Any, why: str) -> Any:
    """dora_linear's ``compute``: what use_fdora was asked for, if there is no reason against it."""
    if not torch.compiler.is_compiling():
        variant.why_decoded = why
    return None if why else variant.compute


def draws(dropout: nn.Module, x: Tensor) -> bool:
    """Whether kernels draw the mask: no dropped copy of x, no stored mask. Elsewhere PEFT's own module is the faster way."""
    return drawable(dropout) and select_backend(x).name == "triton"


def drawable(dropout: Any) -> bool:
    """Whether dora_linear can drop what this module would."""
    return type(dropout) is nn.Dropout and dropout.p < 1 and not hooked(dropout)


class Member(NamedTuple):
    """One adapter of a layer. Of plain LoRA m and c are ones, with which g is 1."""

    params: DoraParams
    s: float
    call: Call | None
    """Of a DoRA adapter."""


def mixed(module: Any, x: Tensor, names: Any) -> Tensor | str:
    """The layer's output for a batch whose row i is adapter ``names[i]``'s; or why it is left to PEFT."""
    if module._disable_adapters or module.merged_adapters or not isinstance(names, (list, tuple)):
        return "no adapter is active"
    if x.dim() < 2 or len(names) != len(x):
        return "not one adapter name for each row"
    parts = module._modules["lora_A"]._modules
    used = [name for name in dict.fromkeys(names) if name in parts]  # of the others the layer has no adapter: the base layer
    found = {name: member_of(module, x, name) for name in used}
    members = [each for each in found.values() if isinstance(each, Member)]
    calls = [each.call for each in members if each.call is not None]
    if not calls:
        return next((each for each in found.values() if isinstance(each, str)), "no DoRA adapter in the batch")
    first = calls[0]
    W, dtype = first.W, first.dtype
    for each in found.values():
        why = each if isinstance(each, str) else unfit(x, W, *each.params, dtype)
        if why:
            return why
    ids = torch.tensor([used.index(name) if name in found else -1 for name in names], device=x.device)
    ids = ids.view(-1, *[1] * (x.dim() - 2)).expand(x.shape[:-1])
    wide = acc_dtype(W.dtype)
    c = torch.stack([params.m.to(wide) if call is None else call.norm() for params, _, call in members])
    for call in calls:
        call.tally()
    y = dora_linear_multi(
        x if dtype is None else x.to(dtype),
        W,
        *dora_stack(of_one_dtype([each.params for each in members])),
        s=[each.s for each in members],
        ids=ids,
        norm=c,
        bias=first.bias,
        ranks=[each.params.A.shape[0] for each in members],
        compute=first.compute,
        grad_compute=first.compute and first.variant.grad_compute,
    )
    return y if dtype is None else y.to(x.dtype)


def member_of(module: Any, x: Tensor, name: str) -> Member | str:
    variant = module.lora_variant.get(name)
    if isinstance(variant, Dora):
        call = call_of(module, x, name, variant)
        if isinstance(call, str) or call.p:
            return call if isinstance(call, str) else "dropout"
        return Member(DoraParams(call.A, call.B, call.m), call.s, call)
    if variant is not None:
        return f"a {type(variant).__name__} in the batch"
    lora_A, lora_B, dropout = (module._modules[part]._modules[name] for part in ("lora_A", "lora_B", "lora_dropout"))
    for part in (lora_A, lora_B):
        if type(part) is not nn.Linear or part.bias is not None or hooked(part):
            return "a plain LoRA adapter with a bias, hooks, or layers of its own"
    if type(dropout) is not nn.Identity and dropout.training:
        return "dropout"
    s = module.scaling[name]
    if isinstance(s, Tensor):
        return "a scaling that is a tensor (prepare_model_for_compiled_hotswap)"
    A, B = lora_A.weight, lora_B.weight
    return Member(DoraParams(A, B, torch.ones(B.shape[0], device=B.device, dtype=torch.float32)), s, None)


def of_one_dtype(whole: list[DoraParams]) -> list[DoraParams]:
    """Parameters that can be a bank: the wider dtype where they differ, which is exact."""
    wide = [reduce(torch.promote_types, [t.dtype for t in each]) for each in zip(*whole, strict=True)]
    return [DoraParams(*[t.to(dtype) for t, dtype in zip(p, wide, strict=True)]) for p in whole]
