"""What a kernel must do at least, from its arguments: the flops of its products, and the bytes of what it reads and writes.

The same table serves the plan, which has arrays (plan.py), and Triton's ``launch_metadata``, which has tensors: a profiler
such as proton sees what ``explain`` says. Vectors of one number per column are left out. With many adapters on one W lengths
are not known, so each product counts once for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton


class Cost(NamedTuple):
    """Flops of products, by the width of their operands, and bytes."""

    flops16: float = 0
    flops32: float = 0
    bytes: float = 0
    flops8: float = 0

    @property
    def flops(self) -> float:
        return self.flops8 + self.flops16 + self.flops32

    def __add__(self, other: Any) -> Cost:
        return Cost(*[a + b for a, b in zip(self, other, strict=True)])


def product(M: int, N: int, K: int, operand: Any) -> Cost:
    """(M, K) (K, N), in the dtype of this operand."""
    return flops_of(M * N * K, operand)


def flops_of(terms: int, operand: Any) -> Cost:
    """Of so many, each a product and a sum."""
    flops, t = 2.0 * terms, matrix(operand)
    if t.dtype.itemsize == 1:
        return Cost(flops8=flops)
    return Cost(flops16=flops) if t.dtype.itemsize == 2 else Cost(flops32=flops)


def moved(*arrays: Any) -> Cost:
    return Cost(bytes=float(sum([matrix(a).nbytes for a in arrays if a is not None])))


def given(*arguments: Any) -> int:
    """How many of these there are, of numbers those other than 0."""
    return sum(bool(a) if isinstance(a, int) else a is not None for a in arguments)


def matrix(a: Any) -> Any:
    """Behind a tensor descriptor, the plan's or Triton's."""
    return getattr(a, "array", None) or getattr(a, "base", a)


def gathered(t: Any, count: int, columns: int) -> Cost:
    """Rows that are looked up in a table."""
    return Cost(bytes=float(count * columns * t.dtype.itemsize))


def decoded(a: Any) -> Cost:
    """Of the columns that are decoded the codes with their scales."""
    stored = moved(a.codes, a.scales, a.scales2).bytes
    return Cost(bytes=stored * (a.last - a.first) / max(1, a.K))


def looked_up(a: Any) -> Cost:
    """W + s B A of the rows that the tokens ask for."""
    return product(a.T, a.D, a.R, a.W) + gathered(a.W, a.T, a.D) + gathered(a.A, a.T, a.R)


def norms(a: Any) -> Cost:
    """B A, of all experts where there are some."""
    return flops_of(a.N * prod(matrix(a.A).shape), a.A)


def embedding_bwd(a: Any) -> Cost:
    return product(a.T, a.D, a.R * given(a.partial_A, a.partial_Y), a.dy) + gathered(a.W, a.T * given(a.partial_m), a.D)


class Work(NamedTuple):
    """What a kernel does. ``moves`` are the arguments that it reads or writes whole; an ``out`` that it adds to is read too.
    ``products`` are sizes, behind them an operand whose dtype they have. An argument that is not given counts for nothing, and
    ``t?other|more`` only where one of the others is. ``rest``: what else there is, from all arguments."""

    moves: str
    products: str = ""
    rest: Callable[[Any], Cost] | None = None


COSTS: dict[str, Work] = {}  # by the name of the kernel


def cost_of(kernel: str, args: Mapping[str, Any]) -> Cost:
    """The cost of a launch, by the name of its kernel and its arguments by name."""
    work = COSTS[kernel]
    found = moved(*[_asked(each, args) for each in work.moves.split()], args["out"] if args.get("ACCUMULATE") else None)
    for each in work.products.split(",") if work.products else ():
        *sizes, of = each.split()
        operand = _asked(of, args)
        if operand is not None:
            found += flops_of(prod([args[size] for size in sizes]), operand)
    return found if work.rest is None else found + work.rest(SimpleNamespace(**args))


def _asked(what: str, args: Mapping[str, Any]) -> Any:
    name, _, others = what.partition("?")
    return args.get(name) if not others or given(*map(args.__getitem__, others.split("|"))) else None


def launched(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's ``launch_metadata``: asked for by those who listen to launches, by nobody else. Names as proton has them."""
    cost = cost_of(metadata.name, args)
    return {"name": metadata.name} | {key: value for key, value in cost._asdict().items() if value}


# Of a kernel that takes many tokens: it is compiled once for numbers that 16 divides and for others, which follow the tokens.
ANY_LENGTH: dict[str, Any] = {"do_not_specialize_on_alignment": ("M", "PROGRAMS", "strips")}


def kernel(moves: str, products: str = "", rest: Callable[[Any], Cost] | None = None, **options: Any) -> Callable[..., Any]:
    """What is launched, in the place of ``triton.jit``, with what it costs."""

    def made(fn: Callable) -> Any:
        COSTS[fn.__name__] = Work(moves, products, rest)
        return triton.jit(launch_metadata=launched, **options)(fn)

    return made
