"""What a plan is: the allocations, matrix products and kernel launches of one call, written down before any tensor is seen.

A facade (fdora/triton/linear.py and its like) writes a plan (builder.py) from the :class:`Like` of each argument: shape,
stride, dtype, alignment. The same likes, options and device give the same plan, so plans are cached (walk.py), shown
(``explain``) and run by two walks that know nothing of DoRA (walk.py in Python, walk.c).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

from fdora.triton.runtime.cost import Cost, cost_of, moved, product
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.layout import pitch


class Like(NamedTuple):
    """What a plan may know of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool  # its address is a multiple of 16 bytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


WORKSPACE = -1  # its slot is the last one


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor of the plan: part of a slot (an argument, a result or the workspace), known by its place and its form."""

    slot: int  # arguments, then results; WORKSPACE
    offset: int  # elements from the first one of the slot; of a temporary, from its own first one
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    temp: int = -1  # the number of the temporary, -1 for what is none

    @property
    def T(self) -> Array:
        return Array(self.slot, self.offset, self.shape[::-1], self.stride[::-1], self.dtype, self.aligned, self.temp)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def __getitem__(self, i: int) -> Array:
        """The i-th along the first axis."""
        return replace(self.rows(i, i + 1), shape=self.shape[1:], stride=self.stride[1:])

    def rows(self, begin: int, end: int, axis: int = 0) -> Array:
        skipped, shape = begin * self.stride[axis], [*self.shape]
        shape[axis] = min(end, shape[axis]) - begin
        aligned = self.aligned and skipped * self.itemsize % 16 == 0
        return replace(self, offset=self.offset + skipped, shape=tuple(shape), aligned=aligned)

    def columns(self, begin: int, end: int) -> Array:
        return self.rows(begin, end, 1)

    def flat(self) -> Array:
        """(..., K) as (M, K); the builder made sure that the leading axes lie one after the other."""
        if len(self.shape) == 2:
            return self
        M, K = prod(self.shape[:-1]), self.shape[-1]
        return replace(self, shape=(M, K), stride=(pitch(self.shape, self.stride), self.stride[-1] if self.shape else 1))

    def words(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Array:
        """The same bytes as elements of another type; the offset must be a whole number of them."""
        assert self.offset * self.itemsize % dtype.itemsize == 0
        return replace(self, shape=shape, stride=stride, dtype=dtype, offset=self.offset * self.itemsize // dtype.itemsize)


class Scalar(NamedTuple):
    """A float32 that comes with each call: changing it needs no other plan."""

    number: int
    name: str


class Tile(NamedTuple):
    """A tensor descriptor: a matrix that a kernel reads or writes in blocks of this shape through TMA."""

    array: Array
    block: tuple[int, int]


class Launch(NamedTuple):
    """One kernel. Arguments are Array, Tile, Scalar, int, float and None; ``constexprs`` follow them. ``told``: its cost, where
    these do not tell it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: tuple[Any, ...]
    num_warps: int
    num_stages: int
    pdl: bool
    told: Cost | None

    @property
    def cost(self) -> Cost:
        named = dict(zip(self.kernel.arg_names, (*self.args, *self.constexprs), strict=True))
        return self.told or cost_of(self.kernel.__name__, named)


class Product(NamedTuple):
    """``out = alpha a b``, or added to it: one matrix product by cuBLAS with a float32 sum."""

    out: Array
    a: Array
    b: Array
    alpha: Scalar | float
    accumulate: bool

    @property
    def cost(self) -> Cost:
        (M, N), K = self.out.shape, self.a.shape[1]
        return product(M, N, K, self.a) + moved(self.a, self.b, self.out, self.out if self.accumulate else None)


class Fill(NamedTuple):
    """Zeros: where a sum has no terms."""

    out: Array

    @property
    def cost(self) -> Cost:
        return moved(self.out)


Step = Launch | Product | Fill


class Allocation(NamedTuple):
    """A result."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Plan:
    """Immutable but for ``native``, where native.py keeps what it compiled from it."""

    name: str
    path: str  # which of the ways through the library this is, and why
    device: Device
    inputs: tuple[Like | None, ...]
    copies: tuple[int, ...]  # arguments that are made contiguous first
    scalars: tuple[str, ...]
    results: tuple[Allocation, ...]
    temporaries: tuple[tuple[int, int], ...]  # offset in the workspace and size of each, in bytes
    workspace: int
    steps: tuple[Step, ...]
    native: Any = field(default=None, repr=False)
    family: Any = field(default=None, repr=False)  # whose member it is (family.py), of ``count`` tokens a sequence
    count: int = 0
    has_products: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.has_products = any(isinstance(step, Product) for step in self.steps)

    @property
    def cost(self) -> Cost:
        copies = sum((2 * like.nbytes for like in map(self.inputs.__getitem__, self.copies) if like is not None), 0)
        return sum((step.cost for step in self.steps), Cost(bytes=copies))
