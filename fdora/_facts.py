"""A key of tensors: their shapes, strides, dtypes, devices and alignment, which is all that checks and plans look at.

The C walk of the kernels (fdora/triton/runtime) brings a faster one with the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from fdora._torch import PLAIN


def python_facts(tensors: tuple[Tensor | None, ...]) -> Hashable | None:
    """None where a tensor is not a plain one."""
    key: list[Any] = []
    for t in tensors:
        if t is None:
            key.append(None)
        elif type(t) in PLAIN:
            key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15 == 0)
        else:
            return None
    return tuple(key)


facts: Callable[[tuple], Hashable | None] = python_facts  # ask as _facts.facts: it may become another


def use(implementation: Callable[[tuple], Hashable | None]) -> None:
    """From now on ask this one."""
    global facts
    facts = implementation
