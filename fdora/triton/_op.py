"""A launcher as torch must see it under a compiler, torch.func or a tensor subclass: an op with a name and a fake.

Defined straight in torch's dispatcher: torch.library.custom_op wraps an op in Python that checks for aliases and looks for
an autograd formula on every call, two thirds of what a compiled call of ours took on the host. Ours return fresh tensors,
and their formulas are in fdora/autograd: called by name, ``torch.ops.fdora.*`` have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# As custom_op has it: a compiler hands over the strides that the fake was given. (torch 2.8 knows only of their order.)
STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_libraries: list[torch.library.Library] = []  # an op lives as long as the library that defined it


def op(name: str, launcher: Callable, fake: Callable, mapped: bool = True) -> Any:
    """``torch.ops.fdora.name`` of this launcher; ``mapped`` teaches it torch.func.vmap."""
    full, library = f"fdora::{name}", _library(name)
    schema = torch.library.infer_schema(launcher, mutates_args=())
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    library.impl(name, launcher, "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=library)
    found = getattr(torch.ops.fdora, name).default
    if mapped:
        _loop_over_batch(full, found, library)
    return found


def _library(name: str) -> torch.library.Library:
    """Of this op alone. A second import in one process (a notebook's reload) takes the place of the first."""
    try:
        from torch._library.custom_ops import get_library_allowing_overwrite
    except ImportError:
        _libraries.append(torch.library.Library("fdora", "FRAGMENT"))
        return _libraries[-1]
    return get_library_allowing_overwrite("fdora", name)


def _loop_over_batch(name: str, op: Any, library: torch.library.Library) -> None:
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

    torch.library.register_vmap(name, rule, lib=library)
