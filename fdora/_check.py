"""Validation of public arguments: shapes, dtypes, devices. One exception type, one sentence per fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module

from fdora import _facts
from fdora._torch import functorch_active

OPTIONAL = ("bias", "norm", "base_sqnorm")
# The axes of each argument by what they are parameters of, W first and what else there is behind it, each with one axis N.
LAYER = {"W": "N K", "A": "r K", "B": "N r", "x": "... K"}
BANK = {"W": "N K", "A": "G r K", "B": "G N r", "m": "G N", "norm": "G N", "x": "... K"}
EXPERTS = {"W": "E N K", "A": "E r K", "B": "E N r", "m": "E N", "bias": "E N", "norm": "E N", "x": "T K"}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDE = (torch.float32, torch.float64)  # of norms


class FdoraError(ValueError):
    """Bad input to a public function of fdora: says what was wanted, what came and what to do."""


class Weight:
    """What may stand in the place of W beside a tensor."""

    shape: Any
    dtype: torch.dtype
    requires_grad: Any
    device: Any
    tensors: Any
    """What is stored."""
    spec: Any
    """All else: hashable."""


def fail(fn: str, arg: str, want: str, have: object, remedy: str) -> FdoraError:
    """The one template of every message."""
    return FdoraError(f"fdora.{fn}: `{arg}` must be {want}, got {have}. {remedy}")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_sharded(*tensors: Any) -> bool:
    """Whether there is a DTensor among them: by name, for torch.distributed is not imported to find none."""
    return "DTensor" in [type(t).__name__ for t in tensors]


def check_whole(fn: str, tensors: dict[str, Any]) -> None:
    """For functions without a table of layouts."""
    for arg, t in tensors.items():
        if is_sharded(t):
            raise fail(
                fn, arg, "a plain tensor", "a DTensor", f"Pass {arg}.full_tensor(), or .to_local() where that is the whole."
            )


def check_left_out(fn: str, options: dict[str, bool]) -> None:
    """``options``: arguments that calls with DTensors do not have, and whether they are given."""
    for arg, given in options.items():
        if given:
            raise fail(
                fn, arg, "left out with DTensors", "a value", "Pass plain tensors: .to_local() or .full_tensor() of each."
            )


def check_only(fn: str, when: str, remedy: str, **given: tuple[Any, Any]) -> None:
    """``given``: of arguments that have one value there, what came and that."""
    for arg, (have, only) in given.items():
        if have != only:
            raise fail(fn, arg, f"{only} {when}", have, remedy)


def check_shapes(
    fn: str, spec: dict[str, str], tensors: dict[str, Any], layout: str = "nn.Linear", norm: str = "dora_norm(W, A, B, s=s)"
) -> dict[str, int]:
    """Match each tensor against its axes, e.g. ``{"W": "N K", "x": "... K"}``; the first to name an axis defines it."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for arg, axes_text in spec.items():
        t = tensors[arg]
        if t is None and arg in OPTIONAL:
            continue
        if not (isinstance(t, Weight) and (arg == "W" or arg.endswith(".W"))):
            check_tensor(fn, arg, t)
        if is_sharded(t):
            raise fail(fn, arg, "a plain tensor", "a DTensor", "Call .full_tensor() on it, or .to_local() on a replica.")
        axes = axes_text.split()
        ragged = axes[:1] == ["..."]
        named = axes[1:] if ragged else axes
        shape = tuple(t.shape)
        tail = shape[len(shape) - len(named) :] if ragged else shape
        known = [(a, n) for a, n in zip(named, tail, strict=False) if a in sizes]
        if len(tail) != len(named) or any(sizes[a] != n for a, n in known):
            want = "(" + ", ".join(axes) + ("," if len(axes) == 1 else "") + ")"
            given = [f"{a}={sizes[a]} (from `{owner[a]}`)" for a in named if a in sizes]
            want += " with " + ", ".join(given) if given else ""
            raise fail(fn, arg, want, shape, _shape_remedy(arg, named, shape, sizes, layout, norm))
        for a, n in zip(named, tail, strict=True):
            if a not in sizes:
                sizes[a], owner[a] = n, arg
    return sizes


def _shape_remedy(arg: str, named: list[str], shape: tuple[int, ...], sizes: dict[str, int], layout: str, norm: str) -> str:
    if arg == "norm" or arg == "base_sqnorm":
        maker = norm if arg == "norm" else "dora_base_sqnorm(W)"
        return f"It was computed for another weight: compute it again with {maker}."
    if not named:
        return f"Pass a tensor without axes, for example {arg}[0]."
    if len(named) == len(shape) == 2 and all(sizes.get(a, n) == n for a, n in zip(named, shape[::-1], strict=True)):
        return f"Did you pass {arg} transposed? Pass {arg}.T."
    return f"Pass the {arg} that belongs to this layer, in {layout} layout."


def check_tensor(fn: str, arg: str, t: object) -> None:
    if not isinstance(t, Tensor):
        remedy = f"Pass a tensor of it, as {arg}.weight." if isinstance(t, Module) else "Wrap it with torch.as_tensor."
        if t is None:
            raise fail(fn, arg, "a torch.Tensor", "None", "It has no default.")
        raise fail(fn, arg, "a torch.Tensor", f"a {type(t).__name__}", remedy)


def check_device(fn: str, like: str, tensors: dict[str, Any]) -> None:
    """All tensors live where ``like`` does."""
    ref = tensors[like]
    assert ref is not None
    for arg, t in tensors.items():
        if t is not None and t.device != ref.device:
            raise fail(
                fn, arg, f"on {ref.device} (the device of `{like}`)", t.device, f"Move it with {arg}.to('{ref.device}')."
            )


def check_dtype(fn: str, arg: str, t: Tensor | Weight | None, allowed: tuple[torch.dtype, ...], remedy: str = "") -> None:
    """``t`` has one of the allowed dtypes."""
    if t is None or t.dtype in allowed:
        return
    want = " or ".join(dict.fromkeys(name(d) for d in allowed))
    raise fail(fn, arg, want, name(t.dtype), remedy or f"Cast it, for example with {arg}.to(torch.{name(allowed[0])}).")


def is_number(value: object) -> TypeGuard[float]:
    """Of Python, also where a compiler makes it symbolic."""
    return isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool)


def is_int(value: object) -> TypeGuard[int]:
    """The same of an int."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_rank(fn: str, r: int) -> None:
    if not is_int(r):
        raise fail(fn, "r", "an int of at least 1", f"a {type(r).__name__}", "Pass the rank of the adapter.")
    if r < 1:
        raise fail(fn, "r", "at least 1", r, "A layer without an adapter is torch.nn.functional.linear.")


def check_positive(fn: str, arg: str, value: object, remedy: str) -> None:
    if type(value) is not int or value < 1:
        raise fail(fn, arg, "a positive int", repr(value), remedy)


def check_s(fn: str, s: float) -> None:
    """``s`` is a finite Python number; tensors would hide a gradient that is never computed."""
    if isinstance(s, Tensor):
        raise fail(fn, "s", "a finite Python number", "a Tensor", "Pass alpha / r as a float, for example s.item().")
    if not is_number(s):
        raise fail(fn, "s", "a finite Python number", f"a {type(s).__name__}", "Pass alpha / r.")
    if s - s != 0:  # inf or NaN; math.isfinite breaks the graph where torch.compile makes s symbolic
        raise fail(fn, "s", "a finite Python number", s, "Pass alpha / r, or alpha / sqrt(r) for rsLoRA.")


def check_weight(fn: str, W: Any) -> Iterable[int]:
    """A matrix of a floating dtype; its sizes N and K."""
    sizes = check_shapes(fn, {"W": "N K"}, {"W": W})
    check_dtype(fn, "W", W, FLOATS, "Dequantise it first.")
    return sizes.values()


def check_operands(fn: str, tensors: dict[str, Any], remedy: str = "Keep it as dora_norm returns it.") -> None:
    """Devices and dtypes of W, A, B and what else there is, by the arguments' names; ``remedy``: of a norm in another dtype."""
    W = tensors["W"]
    check_device(fn, "W", tensors)
    check_dtype(fn, "W", W, FLOATS, "Dequantise or cast it first.")
    for arg in ("A", "B", "m"):
        check_dtype(fn, arg, tensors.get(arg), (torch.float32, W.dtype))
    check_dtype(fn, "x", tensors.get("x"), FLOATS, "Cast it to the dtype of W.")
    check_dtype(fn, "bias", tensors.get("bias"), FLOATS)
    check_dtype(fn, "norm", tensors.get("norm"), WIDE, remedy)
    check_frozen(fn, "W", W)


def check_weights(
    fn: str, tensors: dict[str, Any], s: Any, *remedy: str, axes: dict[str, str] = LAYER, texts: Sequence[str] = ()
) -> dict[str, int]:
    """What every function that takes W, A, B, and perhaps x and more, asks of them; the sizes of their axes. ``remedy``: as of
    :func:`check_operands`; ``texts``: as of :func:`check_shapes`; empty ``axes``: the caller looks at these."""
    sizes = check_shapes(fn, {arg: axes.get(arg, "N") for arg in tensors if axes.get(arg, "N")}, tensors, *texts)
    check_rank(fn, sizes["r"])
    check_operands(fn, tensors, *remedy)
    check_s(fn, s)
    return sizes


def check_frozen(fn: str, arg: str, t: Tensor | Weight | None) -> None:
    """No gradient is ever computed for a frozen argument, so one that asks for it is a mistake."""
    if t is not None and t.requires_grad and torch.is_grad_enabled():
        raise fail(
            fn, arg, "frozen", "requires_grad=True", f"Call {arg}.requires_grad_(False) on the layer, or pass {arg}.detach()."
        )


_passed: set[tuple] = set()
MAX_PASSED = 8192


def key_of(fn: str, tensors: tuple[Any, ...], *scalars: float | None) -> tuple | None:
    """What names such a call, for :func:`once`; None where it must be checked every time: under a compiler or torch.func, for
    tensors that are not plain ones, and for an s that is not a finite number. An int may decide what is asked, as an axis does.
    """
    if torch.compiler.is_compiling() or functorch_active():
        return None
    ints: tuple[int, ...] = ()
    for s in scalars:
        if type(s) is int:
            ints += (s,)
        elif type(s) is not float or s - s != 0:
            return None
    try:
        found = _facts.facts(tensors)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or without storage: the checks say it better
        found = None
    if found is not None:
        return fn, found, ints
    coded = [t for t in tensors if isinstance(t, Weight)]  # what these store is in their place, with what is said of it
    plain = [None if isinstance(t, Weight) else t for t in tensors]
    key = key_of(fn, (*plain, *[t for w in coded for t in w.tensors]), *scalars) if coded else None
    return None if key is None else (*key, *[w.spec for w in coded])


def once(
    fn: str, tensors: tuple[Any, ...], scalars: Iterable[Any], check: Callable[[], object], door: bool = True, W: Any = None
) -> bool:
    """Calls ``check`` unless such a call passed it before: checks of shapes, dtypes and devices are a third of a small layer's
    host time. With a ``door`` for DTensors: whether there are any among them, whose parts are checked in their turn. ``W``: it
    is frozen, in every call.
    """
    key = key_of(fn, tensors, *scalars)
    if key is None or key not in _passed:  # a compiler that reads the set compiles anew whenever it grew
        if door and is_sharded(*tensors):
            return True
        check()
        if key is not None:
            if len(_passed) >= MAX_PASSED:
                _passed.clear()
            _passed.add(key)
    if W is not None and W.requires_grad:
        check_frozen(fn, "W", W)
    return False
