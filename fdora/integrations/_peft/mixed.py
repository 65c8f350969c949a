"""Batches of several adapters (``adapter_names=``) in one call of dora_linear_multi. PEFT serves plain LoRA there, no DoRA.

Nothing is kept but each adapter's own norm: the bank is stacked for every call from the adapters that the batch names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fdora.functional import DoraParams, dora_linear_multi, dora_stack
from fdora.integrations._hook import hooked
from fdora.integrations._peft.dora import FUSED, Dora
from fdora.integrations._peft.verdict import unfit

if TYPE_CHECKING:
    from fdora.integrations._peft.steady import Call

CallOf = Callable[[Any, Tensor, str, Dora], Any]

BASE = "__base__"  # PEFT's name for rows without an adapter


class Member(NamedTuple):
    """One adapter of a layer."""

    params: DoraParams  # m None: plain LoRA
    s: float
    call: Call | None
    """Of a DoRA adapter."""


def mixed(module: Any, x: Tensor, names: Any, call_of: CallOf) -> Tensor | str:
    """The layer's output for a batch whose row i is adapter ``names[i]``'s; or why it is left to PEFT.

    ``call_of`` is linear.py's, which imports this file.
    """
    if module._disable_adapters or module.merged_adapters or not isinstance(names, (list, tuple)):
        return "no adapter is active"
    if x.dim() < 2 or len(names) != len(x):
        return "not one adapter name for each row"
    parts = module._modules["lora_A"]._modules
    used = [name for name in dict.fromkeys(names) if name in parts]  # of the others the layer has no adapter: the base layer
    found = {name: member_of(module, x, name, call_of) for name in used}
    members = [each for each in found.values() if isinstance(each, Member)]
    calls = [each.call for each in members if each.call is not None]
    if not calls:
        return next((each for each in found.values() if isinstance(each, str)), "no DoRA adapter in the batch")
    _, W, *_, bias, _, _, dtype = calls[0]
    for each in found.values():
        why = each if isinstance(each, str) else unfit(x, W, *each.params, dtype)
        if why:
            return why
    ids = torch.tensor([used.index(name) if name in found else -1 for name in names], device=x.device)
    ids = ids.view(-1, *[1] * (x.dim() - 2)).expand(x.shape[:-1])
    params, c = of_one_dtype(members, W), torch.stack([norm_of(each, calls[0]) for each in members])
    for call in calls:
        call.variant.count(FUSED)
    y = dora_linear_multi(
        x if dtype is None else x.to(dtype),
        W,
        *dora_stack(params),
        s=[each.s for each in members],
        ids=ids,
        norm=c,
        bias=bias,
        ranks=[each.params.A.shape[0] for each in members],
    )
    return y if dtype is None else y.to(x.dtype)


def member_of(module: Any, x: Tensor, name: str, call_of: CallOf) -> Member | str:
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
    return Member(DoraParams(lora_A.weight, lora_B.weight, None), s, None)  # type: ignore[arg-type]


def of_one_dtype(members: list[Member], W: Any) -> list[DoraParams]:
    """Parameters that can be a bank: the wider dtype where they differ, which is exact; m of ones for plain LoRA."""
    ones = torch.ones(W.shape[0], device=W.device, dtype=torch.float32)
    whole = [p if p.m is not None else p._replace(m=ones) for p, _, _ in members]
    for part in range(3):
        dtypes = {p[part].dtype for p in whole}
        if len(dtypes) > 1:
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            whole = [DoraParams(*(t.to(wide) if i == part else t for i, t in enumerate(p))) for p in whole]
    return whole


def norm_of(member: Member, like: Call) -> Tensor:
    """c (N,): the one that the adapter keeps; ones for plain LoRA, with which g is 1."""
    if member.call is not None:
        return member.call.norm()
    dtype = torch.float64 if like.W.dtype == torch.float64 else torch.float32
    return torch.ones(like.W.shape[0], device=like.W.device, dtype=dtype)
