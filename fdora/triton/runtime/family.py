"""One plan for a class of lengths: written once, for the longest of them, with `Rows`, and filled in for each.

A new length costs 700 to 1400 calls of Python for each plan that is written, a fifth of a step of few tokens where no length
repeats, and some 120 for each that is filled in. Workspaces are those of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from fdora.triton.runtime.device import Device
from fdora.triton.runtime.plan import Array, Like, Plan
from fdora.triton.runtime.rows import Fixed, Rows, Tokens, class_of, rows

MOST = 1024  # families; each holds a plan
_families: dict[tuple, Any] = {}  # of Family, and None where a plan cannot be written so


class Family:
    """``plan`` has `Rows` in it. ``draft``: what native.py keeps of it."""

    def __init__(self, plan: Plan, tokens: Tokens):
        self.plan, self.tokens = plan, tokens
        self.draft: Any = None

    def member(self, count: int) -> Plan | None:
        """The plan for sequences of so many tokens, if it is one of these."""
        return Member(self, count) if self.tokens.least <= count <= self.tokens.most else None


class Member(Plan):
    """What only explain() and a first run ask of it is filled in when asked for."""

    def __init__(self, family: Family, count: int):
        plan, self.family, self.count, self.native = family.plan, family, count, None
        for name in ("name", "path", "device", "copies", "scalars", "temporaries", "workspace", "has_products"):
            setattr(self, name, getattr(plan, name))
        self.results = tuple([a._replace(shape=at(a.shape, count), stride=at(a.stride, count)) for a in plan.results])

    def __getattr__(self, name: str) -> Any:
        if name not in ("inputs", "steps"):
            raise AttributeError(name)
        value = filled(getattr(self.family.plan, name), self.count)
        setattr(self, name, value)
        return value


def plan_of(maker: Callable[..., Plan], likes: Sequence[Like | None], device: Device, options: tuple) -> Plan:
    """The plan of this call: of a family where its maker has them (op.py), else one of its own."""
    x = likes[0]
    if x is not None and len(x.shape) > 1 and getattr(maker, "has_families", False):
        family = _family_of(maker, likes, x, device, options)
        if family is not None and (member := family.member(x.shape[-2])) is not None:
            return member
    return maker(likes, device, *options)


def _family_of(maker: Any, likes: Sequence[Like | None], x: Like, device: Device, options: tuple) -> Family | None:
    """That of this call's class of lengths; None where a length has its own plan, or one cannot be written with `Rows`."""
    ahead = prod(x.shape[:-2])
    bounds = class_of(ahead * x.shape[-2])
    axes = None if bounds is None else _axes(likes, x, ahead * x.shape[-2])
    if bounds is None or axes is None:
        return None
    least, most = -(-bounds[0] // ahead), bounds[1] // ahead
    key = maker, _of_length(likes, axes, most), device, options
    family: Any = _families.get(key, False)
    if family is False:
        if len(_families) >= MOST:
            _families.clear()
        tokens = Tokens(most, least, most)
        try:
            family = Family(maker(_of_length(likes, axes, rows(tokens)), device, *options), tokens)
        except Fixed:
            family = None
        _families[key] = family
    found: Family | None = family
    return found


def _axes(likes: Sequence[Like | None], x: Like, tokens: int) -> list[tuple[int, int]] | None:
    """Of each, the axis of the tokens and how many times those of a sequence it has: as x has them, or all on the first
    axis. (-1, 0) where it has none. None if another axis is as long."""
    found, ahead, count = [], x.shape[:-1], x.shape[-2]
    for like in likes:
        shape = () if like is None else like.shape
        if len(shape) > 1 and shape[:-1] == ahead:
            axis = len(shape) - 2
        else:
            axis = 0 if len(shape) in (1, 2) and shape[0] == tokens else -1
        if count in shape[axis + 1 :] or tokens in shape[axis + 1 :]:
            return None
        found.append((axis, shape[axis] // count if axis >= 0 else 0))
    return found


def _of_length(likes: Sequence[Like | None], axes: list[tuple[int, int]], count: int) -> tuple[Like | None, ...]:
    """With so many tokens a sequence, also in the strides over them."""
    found: list[Like | None] = []
    for like, (axis, times) in zip(likes, axes, strict=True):
        if like is not None and times:
            shape, stride = (*like.shape[:axis], times * count, *like.shape[axis + 1 :]), [*like.stride]
            for i in reversed(range(axis)):
                if stride[i] == like.shape[i + 1] * like.stride[i + 1]:
                    stride[i] = shape[i + 1] * stride[i + 1]
            like = Like(shape, tuple(stride), like.dtype, like.aligned)
        found.append(like)
    return tuple(found)


def at(numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple([n.at(count) if isinstance(n, Rows) else n for n in numbers])


def filled(value: Any, count: int) -> Any:
    """With numbers in the place of `Rows`."""
    if isinstance(value, Rows):
        return value.at(count)
    if isinstance(value, Array):
        (offset,) = at((value.offset,), count)
        return replace(value, offset=offset, shape=at(value.shape, count), stride=at(value.stride, count))
    if isinstance(value, tuple):
        parts = [filled(part, count) if isinstance(part, (Rows, Array, tuple)) else part for part in value]
        return tuple(parts) if type(value) is tuple else type(value)(*parts)
    return value
