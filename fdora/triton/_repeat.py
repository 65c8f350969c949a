"""An op that runs again for tensors that look the same: its allocations and its launches, without the code that chose them.

The first call of a kind runs as it is written and is written down: what it allocates, and which kernels it starts on what.
Later calls of that kind read this off. The code that chooses tiles, looks at alignment, makes descriptors and finds kernels
takes longer on the host than the launches do, and on a slow host the GPU waited for it.

A kind is all that such code may look at: shapes, strides and dtypes of tensors, other arguments by value, the device; and
pointers are multiples of 16. A call that does more than allocate, view and launch is not written down: it runs as it is
written every time. So does one that somebody watches: selective checkpointing counts the ops of a forward and of its
recomputation, which must be the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from fdora.triton import _launch
from fdora.triton._launch import PLAIN, hooked, launch, launch_by_name, writing

MOST = 4096  # sequences of any length make new kinds: start over
_EMPTY = ("aten::empty.memory_format", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_programs: dict[tuple, Program | None] = {}


class Empty(NamedTuple):
    """One allocation."""

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class Launch(NamedTuple):
    """One kernel. ``places`` say where in the program's table each of its arguments lies."""

    run: Any
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    described: list[tuple[int, dict[str, Any], int]]  # where a descriptor goes, its fields, the tensor it is of
    arguments: Callable[[list], tuple]
    by_name: Any


class Program:
    """Allocations and launches in their order, and which tensors are the result.

    The table holds a pointer for each tensor, arguments first, then a place for each descriptor, then all that stays the same.
    """

    def __init__(self, device: int):
        self.device = device
        self.table: list = []
        self.steps: list[Any] = []  # Empty or Launch
        self.results: list[int | None] = []
        self.pack: Callable[[list], Any] = list

    def __call__(self, tensors: list[Tensor]) -> Any:
        """NotImplemented where a pointer is not aligned or another device is the current one."""
        direct = _launch.DIRECT
        if direct and torch.cuda.current_device() != self.device:
            return NotImplemented
        stream = torch._C._cuda_getCurrentRawStream(self.device) if direct else 0
        table, bits, k = self.table.copy(), 0, 0
        for t in tensors:
            table[k] = pointer = t.data_ptr()
            bits |= pointer
            k += 1
        if bits & 15:
            return NotImplemented
        for step in self.steps:
            if type(step) is Empty:
                shape, stride, dtype, device = step
                t = torch.empty_strided(shape, stride, dtype=dtype, device=device)  # a third faster than torch.empty
                table[k] = t.data_ptr()
                tensors.append(t)
                k += 1
                continue
            run, (x, y, z), function, metadata, described, arguments, by_name = step
            for place, fields, i in described:
                table[place] = tile = TensorDescriptor.__new__(TensorDescriptor)  # its checks passed for the first
                tile.__dict__.update(fields)
                tile.base = tensors[i]
            if direct:
                run(x, y, z, stream, function, metadata, None, None, None, *arguments(table))
            else:
                by_name(arguments(table), tensors)
        return self.pack([None if i is None else tensors[i] for i in self.results])


class _Writer(TorchDispatchMode):
    """Sees every allocation and every launch of a call, and whatever else it does, which spoils the program."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.program = Program(tensors[0].get_device())
        self.tensors = list(tensors)  # alive, so that no address is taken twice
        self.places = {t.data_ptr(): k for k, t in enumerate(tensors)}
        self.spoilt = self.launching = False
        self.launches: dict[int, tuple] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.launching or func.is_view:
            return out
        if func.name() in _EMPTY and out.numel():
            self.program.steps.append(Empty(out.shape, out.stride(), out.dtype, out.device))
            self.places[out.data_ptr()] = len(self.tensors)
            self.tensors.append(out)
        else:
            self.spoilt = True
        return out

    def launch(self, kernel: Any, grid: tuple, args: tuple, consts: tuple, *rest: Any) -> tuple | None:
        writing.program, self.launching = None, True
        try:
            found = launch(kernel, grid, args, consts, *rest)
        finally:
            writing.program, self.launching = self, False
        bases = {i: a.base if isinstance(a, TensorDescriptor) else a for i, a in enumerate(args)}
        slots = {i: self.places.get(t.data_ptr()) for i, t in bases.items() if isinstance(t, Tensor)}
        if None in slots.values() or (_launch.DIRECT and found is None):
            self.spoilt = True
        else:
            self.launches[len(self.program.steps)] = (found, kernel, grid, args, consts, rest, slots)
            self.program.steps.append(())
        return found

    def finish(self, result: Any) -> Program | None:
        """The program, if it says all that the call did."""
        program = self.program
        for t in [result] if isinstance(result, Tensor) else result:
            k = None if t is None else self.places.get(t.data_ptr())
            program.results.append(k)
            self.spoilt |= t is not None and (k is None or _looks(t) != _looks(self.tensors[k]))
        if isinstance(result, Tensor):
            program.pack = _only
        elif not isinstance(result, list):
            program.pack = getattr(type(result), "_make", type(result))
        if self.spoilt:
            return None
        program.table = [None] * len(self.tensors)
        for at, each in self.launches.items():
            program.steps[at] = self.step(*each)
        return program

    def step(
        self, found: tuple | None, kernel: Any, grid: tuple, args: tuple, consts: tuple, rest: tuple, slots: dict
    ) -> Launch:
        table, places, described = self.program.table, [], []
        for i, a in enumerate((*args, *consts)):
            if i in slots and isinstance(a, Tensor):
                places.append(slots[i])
                continue
            places.append(len(table))
            if i in slots:
                described.append((len(table), vars(a) | {"base": None}, slots[i]))
            table.append(None if i in slots else a)
        arguments = itemgetter(*places) if len(places) > 1 else lambda table: (table[places[0]],)
        run, function, metadata = found or (None, None, None)
        by_name = None if found else _by_name(kernel, grid, len(args), consts, rest, slots, args)
        return Launch(run, (*grid, 1, 1)[:3], function, metadata, described, arguments, by_name)


def _by_name(kernel: Any, grid: tuple, n: int, consts: tuple, rest: tuple, slots: dict[int, int], args: tuple) -> Callable:
    """For the interpreter, which wants tensors where the driver takes pointers."""
    looks = {i: (k, _looks(args[i])) for i, k in slots.items() if isinstance(args[i], Tensor)}

    def launch(values: tuple, tensors: list[Tensor]) -> None:
        named = list(values[:n])
        for i, (k, looked) in looks.items():
            named[i] = _seen_as(tensors[k], *looked)
        launch_by_name(kernel, grid, tuple(named), consts, *rest)

    return launch


def _seen_as(t: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    at = t.storage_offset() * t.element_size() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), at, shape, stride)


def _only(found: list) -> Any:
    return found[0]


def _looks(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype


def repeatable(op: Callable) -> Callable:
    """For an op of positional arguments that returns a tensor, or a tuple, list or NamedTuple of tensors and None.

    A keyword is for a search that tries other launches: never written down.
    """

    @wraps(op)
    def call(*args: Any, **search: Any) -> Any:
        possible = _launch.DIRECT or _launch.INTERPRET
        watched = getattr(writing, "program", None) is not None or torch._C._len_torch_dispatch_stack() or hooked()
        if search or not possible or watched:
            with torch.cuda.device_of(args[0]):
                return op(*args, **search)
        key: list = [op]
        tensors: list[Tensor] = []
        for a in args:
            if type(a) in PLAIN:
                tensors.append(a)
                key += (a.shape, a.stride(), a.dtype)
            elif isinstance(a, Tensor):  # a subclass that dispatches like a tensor
                with torch.cuda.device_of(a):
                    return op(*args)
            else:
                key.append(a)
        key.append(tensors[0].get_device())
        kind = tuple(key)
        program = _programs.get(kind)
        if program is not None:
            result = program(tensors)
            if result is not NotImplemented:
                return result
        with torch.cuda.device_of(tensors[0]):
            return op(*args) if kind in _programs else _written_down(kind, op, args, tensors)

    return call


def _written_down(kind: tuple, op: Callable, args: tuple, tensors: list[Tensor]) -> Any:
    addresses = {t.data_ptr() for t in tensors}
    if len(addresses) < len(tensors) or any(at & 15 for at in addresses):
        return op(*args)  # two arguments at one address: another call of this kind may tell them apart
    writer = writing.program = _Writer(tensors)
    try:
        with writer:
            result = op(*args)
    finally:
        writing.program = None
    if len(_programs) >= MOST:
        _programs.clear()
    _programs[kind] = writer.finish(result)
    return result
