"""Writes a plan (plan.py): its arguments, results, temporaries and steps.

Temporaries live in one workspace. The builder knows the first and the last step that uses each, and gives two of them the
same bytes where those do not overlap: everything runs in order on one stream. A kernel that starts early (``pdl``) writes
nothing, and reads nothing of the kernel ahead, before it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from fdora.triton.runtime.cost import Cost
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.layout import collapses, contiguous, is_operand, packed
from fdora.triton.runtime.plan import WORKSPACE, Allocation, Array, Fill, Launch, Like, Plan, Product, Scalar, Tile
from fdora.triton.runtime.rows import Fixed, Rows


class Builder:
    """Writes a plan. Arguments first, in their order; then results, temporaries and steps."""

    def __init__(self, name: str, device: Device):
        self.name, self.device, self.path = name, device, ""
        self.inputs: list[Any] = []  # of Like and None
        self.copies: list[int] = []
        self.scalars: list[str] = []
        self.forms: dict[str, Any] = {}  # of each result that may be asked for, its shape and dtype; None where it is not
        self.results: list[Allocation] = []
        self.sizes: list[int] = []  # bytes of each temporary
        self.used: list[tuple[int, int]] = []  # its first and last step
        self.steps: list[Any] = []
        self.cast_with: dict[Array, list[Array]] = {}  # see triton/copy.py
        self.casts: dict[tuple[Array, torch.dtype], Array] = {}

    @property
    def pdl(self) -> bool:
        """Whether kernels may start early."""
        return self.device.supports_pdl

    # arguments: an Array each, None for what is not given

    def vector(self, like: Like | None) -> Any:
        """(N,), with no gaps."""
        return self._input(like, like is None or like.stride == (1,) or like.shape[0] <= 1)

    def matrix(self, like: Like | None) -> Any:
        """Any strides: for kernels that take them."""
        return self._input(like, True)

    def operand(self, like: Like | None) -> Any:
        """Rows or columns without gaps: what cuBLAS takes."""
        return self._input(like, like is None or is_operand(like.shape, like.stride))

    def stack(self, like: Like | None) -> Any:
        """A matrix of any strides, or several on a first axis, each with rows or columns without gaps."""
        return self._input(like, like is None or len(like.shape) == 2 or 1 in like.stride[1:])

    def tokens(self, like: Like | None) -> Any:
        """(..., K) as (M, K), the elements of a row next to each other, rows at one distance."""
        if like is None:
            return self._input(None, True)
        whole = self._input(like, collapses(like.shape, like.stride))
        assert whole is not None
        return whole.flat()

    def planes(self, like: Like) -> Any:
        """(M, N) as tokens are, or (L, N, P) with no gaps."""
        return self.flat(like) if len(like.shape) == 3 else self.tokens(like)

    def rest(self, likes: list[Like | None]) -> list[Like | None]:
        """What the function that writes the plan reads itself."""
        return likes

    def flat(self, like: Like | None) -> Any:
        """Whatever its shape, as (n,) with no gaps."""
        whole = self._input(like, like is None or like.stride == contiguous(like.shape))
        return None if whole is None else whole.words((whole.numel,), (1,), whole.dtype)

    def _input(self, like: Like | None, as_it_is: bool) -> Array | None:
        assert not self.results, "arguments come before results, whose slots follow theirs"
        slot = len(self.inputs)
        self.inputs.append(like)
        if like is None:
            return None
        if not as_it_is:
            self.copies.append(slot)
            return Array(slot, 0, like.shape, contiguous(like.shape), like.dtype, True)
        return Array(slot, 0, tuple(like.shape), tuple(like.stride), like.dtype, like.aligned)

    def scalar(self, name: str) -> Scalar:
        self.scalars.append(name)
        return Scalar(len(self.scalars) - 1, name)

    # what is made

    def result(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """Allocated, returned under this name. All results come before the first step that uses one."""
        shape = tuple(shape)
        self.results.append(Allocation(name, shape, contiguous(shape), dtype))
        return Array(len(self.inputs) + len(self.results) - 1, 0, shape, contiguous(shape), dtype, True)

    def wanted(self) -> list[Any]:
        """The results as they were declared; None of what is not asked for."""
        return [form and self.result(name, *form) for name, form in self.forms.items()]

    def temp(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, stride: Sequence[int] | None = None) -> Array:
        """In the workspace, for as long as steps use it. Most are sums."""
        shape = tuple(shape)
        stride = contiguous(shape) if stride is None else tuple(stride)
        extent = 1 + sum((n - 1) * d for n, d in zip(shape, stride, strict=True)) if prod(shape) else 0
        self.sizes.append(extent * dtype.itemsize)
        self.used.append((len(self.steps), -1))
        return Array(WORKSPACE, 0, shape, stride, dtype, True, len(self.sizes) - 1)

    # steps

    def launch(
        self,
        kernel: Any,
        grid: Sequence[int] | str,
        given: dict[str, Any],
        *records: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        pdl: bool = False,
        cost: Cost | None = None,
    ) -> None:
        """``given``: the kernel's parameters by name. What it lacks comes from the fields of ``records``, the first that has
        it; strides are those of their tensors. A record of a tile brings its warps and stages. ``grid`` may be a name of
        axes: "M N" has a program for each BLOCK_M of M and BLOCK_N of N, "MN" the same programs on one axis. ``cost`` only
        where the parameters do not tell it."""
        names, others, strides = _parameters(kernel)
        values: dict[str, Any] = {}
        for record in reversed(records):
            values |= record if isinstance(record, dict) else record._asdict()
        num_warps, num_stages = values.get("num_warps", num_warps), values.get("num_stages", num_stages)
        if isinstance(grid, str):
            of = values | given
            grid = [prod([cdiv(of[axis], of[f"BLOCK_{axis}"]) for axis in axes]) for axes in grid.split()]
        if prod(grid) == 0:
            return
        values = {name: value for name, value in values.items() if name in names} | given
        for name, (tensor, *axis) in strides.items():
            if name not in given and not isinstance(values.get(tensor, 0), int):
                values[name] = _stride(values[tensor], *axis)
        if "PDL" in names:
            values.setdefault("PDL", pdl)
        if values.keys() != names.keys():
            missing, unknown = names.keys() - values.keys(), values.keys() - names.keys()
            raise TypeError(f"a launch of {kernel.__name__} lacks {sorted(missing)} and has {sorted(unknown)} too many")
        ordered = tuple([values[name] for name in names])
        if any(isinstance(constant, Rows) for constant in ordered[others:]):
            raise Fixed  # another kernel for each number of tokens
        self._use([a.array if isinstance(a, Tile) else a for a in ordered])
        self.steps.append(Launch(kernel, tuple(grid), ordered[:others], ordered[others:], num_warps, num_stages, pdl, cost))

    def product(self, out: Array, a: Array, b: Array, alpha: Scalar | float = 1.0, accumulate: bool = False) -> None:
        """(M, K) (K, N) -> (M, N), in the dtype of both or in float32: cuBLAS has no others."""
        (M, K), N = a.shape, b.shape[1]
        assert out.shape == (M, N) and b.shape[0] == K and a.dtype == b.dtype
        assert out.dtype in (a.dtype, torch.float32)
        if out.numel == 0:
            return
        if K == 0:
            return None if accumulate else self.zero(out)
        self._use((out, a, b))
        self.steps.append(Product(out, a, b, alpha, accumulate))

    def zero(self, out: Array) -> None:
        if out.numel:
            self._use((out,))
            self.steps.append(Fill(out))

    def _use(self, arrays: Iterable[Any]) -> None:
        now = len(self.steps)
        for a in arrays:
            if isinstance(a, Array) and a.temp >= 0:
                self.used[a.temp] = (min(self.used[a.temp][0], now), now)

    def plan(self) -> Plan:
        sizes = [*map(int, self.sizes)]
        offsets, workspace = packed(sizes, self.used)
        return Plan(
            self.name,
            self.path,
            self.device,
            tuple(self.inputs),
            tuple(self.copies),
            tuple(self.scalars),
            tuple(self.results),
            tuple(zip(offsets, sizes, strict=True)),
            workspace,
            tuple(self.steps),
        )


def asked(forms: dict[str, Any], needs: Iterable[bool]) -> dict[str, Any]:
    """The forms of results that are needed, None of others."""
    return {name: form if need else None for (name, form), need in zip(forms.items(), needs, strict=True)}


def numbered(name: str, forms: Iterable[Any]) -> dict[str, Any]:
    """Those of results that each layer has."""
    return {f"{name}{i}": form for i, form in enumerate(forms)}


def named(names: str, values: Iterable[Any]) -> dict[str, Any]:
    """What has an order of its own, as parameters of a kernel."""
    return dict(zip(names.split(), values, strict=True))


class _Parameters(NamedTuple):
    """Of a kernel: its names in order, how many are no constants, and the tensor and the axis of each stride."""

    names: dict[str, None]
    others: int
    strides: dict[str, tuple[str, int, int]]


@cache
def _parameters(kernel: Any) -> _Parameters:
    """``stride_wn, stride_wk`` are those of the first axes of ``w`` or ``W``, in order: the longest name that one begins
    with."""
    names = dict.fromkeys(kernel.arg_names)
    others = [name for name in names if name not in kernel.fn.__annotations__]
    strides, axes = {}, Counter[str]()
    for name in others:
        rest = name.removeprefix("stride_").lower()
        tensors = [each for each in others if rest.startswith(each.lower())] if rest != name.lower() else []
        if tensors:
            of = max(tensors, key=len)
            strides[name] = (of, axes[of])
            axes[of] += 1
    return _Parameters(names, len(others), {name: (of, i, axes[of]) for name, (of, i) in strides.items()})


def _stride(t: Any, axis: int, axes: int) -> int | None:
    """Of the first ``axes``; 0 along one that a tensor lacks. A descriptor has its own."""
    if t is None or isinstance(t, Tile):
        return None if t else 0
    stride: tuple[int, ...] = (0,) * (axes - len(t.stride)) + t.stride
    return stride[axis]
