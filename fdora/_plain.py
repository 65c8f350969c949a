"""Layers that are called as they were before: what they are called with, asked as little as is enough to know that.

An adapted layer is seven modules, and each of them may be another by the next call. To ask them in Python takes the host as
long as a launch. The C beside the kernels (fdora/triton/runtime/plain.c) brings faster functions with the same meaning. They
are told what a framework calls its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A module of a layer, as it was."""

    path: tuple[str, ...]  # from the layer
    kind: type
    parameters: tuple[str, ...]  # which of them the call takes
    same: tuple[tuple[str, Any], ...] = ()  # attributes that have these values


class Names(NamedTuple):
    """How a framework calls attributes of its layers."""

    variants: str  # a dict: what fdora keeps of each adapter, its route among that
    active: str  # the name of the active adapter, perhaps in a list
    quiet: tuple[str, ...]  # of any module: it must be absent or false


class Route(NamedTuple):
    """What was found out about a layer with one adapter, and what it was found out from. Holds no tensor."""

    name: str  # of the adapter
    s: float
    entries: tuple[Entry, ...]  # the layer itself comes first
    size: int  # how many parameters
    how: Any = None  # what else its call is made with, known by who follows the route


Found = tuple[Any, ...]  # the variant, s, and the parameters of all entries in their order


def python_follow(layers: tuple[Any, ...], names: Names, alone: bool) -> list[Found] | None:
    """Of each layer what its route leads to. None where one has no route for its active adapter; where a module is missing, of
    another class, has no parameter of that name (one that is None counts), or has other attributes; or where one of the
    quiet attributes of a module is true. ``alone``: the layer is called by itself, so that its own hooks have run: none of
    its own attributes are asked, and it must not share its call with others."""
    all_found: list[Found] = []
    for layer in layers:
        facts = layer.__dict__
        name = facts.get(names.active)
        if type(name) is list and len(name) == 1:
            name = name[0]
        variant = facts.get(names.variants, {}).get(name) if type(name) is str else None
        route = None if variant is None else variant.__dict__.get("route")
        if route is None or route.name != name or (alone and variant.__dict__.get("shared") is not None):
            return None
        found: list[Any] = [variant, route.s]
        for i, entry in enumerate(route.entries):
            part = layer
            for step in entry.path:
                part = part.__dict__["_modules"].get(step)
                if part is None:
                    return None
            facts = part.__dict__
            if type(part) is not entry.kind or any(map(facts.get, () if alone and not i else names.quiet)):
                return None
            if any([at not in facts or facts[at] != value for at, value in entry.same]):
                return None
            for parameter in entry.parameters:
                if parameter not in facts["_parameters"]:
                    return None
                found.append(facts["_parameters"][parameter])
        all_found.append(tuple(found))
    return all_found


def python_unchanged(tensors: tuple[Any, ...], references: tuple[Any, ...], versions: tuple[int, ...], i: int) -> bool:
    """Whether these are the tensors that are referred to, and nobody wrote there since they had these versions. Of n groups of
    references each has one for a tensor: those at i, i + n, ..."""
    n = len(references) // len(tensors)
    known = zip(tensors, references[i::n], versions[i::n], strict=True)
    return all([reference() is t is not None and t._version == version for t, reference, version in known])


def python_operands(
    x: Any, found: list[Found], norms: Any, references: tuple[Any, ...], s: list[float], versions: tuple[int, ...], c: list[Any]
) -> tuple[Any, ...] | None:
    """x, and of each layer the operands, with its c among those of the n layers of a model, whose norms these are: what is
    known of it stands at the layer's place, its W, A and B as for :func:`python_unchanged`. None where a layer has no place
    there, has another s, or other tensors."""
    operands: list[Any] = [x]
    for variant, scale, W, A, B, m, bias in found:
        kept = variant.__dict__["kept"].__dict__
        i = kept["place"]
        if kept["norms"] is not norms or not 0 <= i < len(s) or s[i] != scale:
            return None
        if not python_unchanged((W, A, B), references, versions, i):
            return None
        operands += W, A, B, m, c[i], bias, None
    return tuple(operands)


# Ask as _plain.follow and so on: they may become others.
follow: Callable[[tuple[Any, ...], Names, bool], list[Found] | None] = python_follow
unchanged: Callable[[tuple[Any, ...], tuple[Any, ...], tuple[int, ...], int], bool] = python_unchanged
operands: Callable[..., tuple[Any, ...] | None] = python_operands


def use(following: Callable, comparing: Callable, collecting: Callable) -> None:
    """From now on ask these."""
    global follow, unchanged, operands
    follow, unchanged, operands = following, comparing, collecting
