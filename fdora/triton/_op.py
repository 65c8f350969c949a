"""A launcher as torch must see it under a compiler, torch.func or a tensor subclass: an op with a name and a fake.

Defined straight in torch's dispatcher: torch.library.custom_op wraps an op in Python that checks for aliases and looks for
an autograd formula on every call, two thirds of what a compiled call of ours took on the host. Ours return fresh tensors,
and their formulas are in fdora/autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def op(name: str, launcher: Callable, fake: Callable, mapped: bool = True) -> Any:
    """``torch.ops.fdora.name`` of this launcher; ``mapped`` teaches it torch.func.vmap."""
    full = f"fdora::{name}"
    torch.library.define(full, torch.library.infer_schema(launcher, mutates_args=()), tags=TAGS)
    torch.library.impl(full, "CompositeExplicitAutograd", launcher)
    torch.library.register_fake(full, fake)
    found = getattr(torch.ops.fdora, name).default
    if mapped:
        _loop_over_batch(full, found)
    return found


def _loop_over_batch(name: str, op: Any) -> None:
    """One call per mapped element, the results stacked."""

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple:
        def one(i: int) -> Any:
            return op(
                *(a if d is None or not isinstance(a, Tensor) else a.select(d, i) for a, d in zip(args, in_dims, strict=True))
            )

        results = [one(i) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return [torch.stack(column) for column in zip(*results, strict=True)], [0] * len(results[0])

    torch.library.register_vmap(name, rule)
