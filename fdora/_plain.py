"""The parameters of modules that are called as they are: no hooks, no class but the one that is known.

A layer of PEFT is seven modules, and each of them may be another by the next call. To ask them in Python takes the host as long
as a launch. The C beside the kernels (fdora/triton/runtime/plain.c) brings a faster function with the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Entry = tuple[tuple[str, ...], type, tuple[str, ...]]
"""The path to a module from the one that is asked, its class, and the names of its parameters."""


def python_parameters(module: Any, spec: tuple[Entry, ...], quiet: tuple[str, ...]) -> tuple | None:
    """The parameters of all entries in their order; None where a module is missing or of another class, has no parameter of
    that name (one that is None counts), or has one of the attributes ``quiet`` that is true."""
    found: list[Any] = []
    for path, kind, names in spec:
        part = module
        for name in path:
            part = part.__dict__["_modules"].get(name)
            if part is None:
                return None
        facts = part.__dict__
        if type(part) is not kind or any(map(facts.get, quiet)):
            return None
        own = facts["_parameters"]
        for name in names:
            if name not in own:
                return None
            found.append(own[name])
    return tuple(found)


_parameters: Callable[[Any, tuple[Entry, ...], tuple[str, ...]], tuple | None] = python_parameters


def parameters(module: Any, spec: tuple[Entry, ...], quiet: tuple[str, ...]) -> tuple | None:
    return _parameters(module, spec, quiet)


def use(implementation: Callable[[Any, tuple[Entry, ...], tuple[str, ...]], tuple | None]) -> None:
    """From now on ask this one."""
    global _parameters
    _parameters = implementation
