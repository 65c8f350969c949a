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


def python_places(references: tuple) -> tuple[tuple[Tensor, ...], Hashable, tuple[int, ...]] | None:
    """The tensors that are referred to, a key with their facts and addresses, and their versions; None where one is gone, or no
    plain one."""
    tensors = tuple([reference() for reference in references])
    key = None if any([t is None for t in tensors]) else python_facts(tensors)
    if key is None:
        return None
    return tensors, (key, *map(Tensor.data_ptr, tensors)), tuple([t._version for t in tensors])


# Ask as _facts.facts, _facts.places: they may become others.
facts: Callable[[tuple], Hashable | None] = python_facts
places: Callable[[tuple], tuple[tuple[Tensor, ...], Hashable, tuple[int, ...]] | None] = python_places


def use(reading: Callable, placing: Callable) -> None:
    """From now on ask these."""
    global facts, places
    facts, places = reading, placing
