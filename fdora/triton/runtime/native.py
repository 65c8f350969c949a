"""A plan whose kernels are compiled, as one object of walk.c that launches them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdora.triton.runtime.device import INTERPRETED, Device, by_another_thread
from fdora.triton.runtime.family import at
from fdora.triton.runtime.plan import Allocation, Array, Fill, Launch, Plan, Product, Scalar, Tile
from fdora.triton.runtime.private import (
    COMPUTE_32F,
    CUDA_TYPE,
    Compiled,
    look_into,
    packing,
    tensor_map,
    walker,
)
from fdora.triton.runtime.rows import Rows

# What starts a kernel, by all that Triton compiles a kernel of its own for; None: only Triton itself can start this one.
_compiled: dict[tuple, Compiled | None] = {}
_AVAILABLE = torch.version.cuda is not None and not INTERPRETED
_dummies: dict[int, torch.Tensor] = {}  # an address on each device, for maps whose own comes with each call


def remember(device: Device, step: Launch, built: Any) -> None:
    """What the public way compiled."""
    if _AVAILABLE:
        key = _key(device, step)
        if key not in _compiled:
            _compiled[key] = look_into(built)


def is_more_aligned(a: Any, given: Any) -> bool:
    """Some rows of a matrix at an odd address begin at 16 bytes: Triton sees that, a plan for all odd addresses cannot."""
    return isinstance(a, Array) and not a.aligned and given.data_ptr() % 16 == 0


def program(plan: Plan) -> Any:
    """Something to run; None while a kernel is not compiled; False where only the walk in Python can."""
    family, count = plan.family, plan.count
    if family is not None and family.draft is not None and family.draft.serves(count):
        return family.draft.program(count, plan.results)
    if not _AVAILABLE or walker() is None or not _fits(plan, walker()):
        return False
    kernels = kernels_of(plan)
    if kernels is None or None in kernels:
        return None if kernels is None else False
    if family is None or family.draft is not None:
        return assemble(plan, kernels, walker(), _dummy(plan.device.gpu))
    family.draft = Draft(family.plan, kernels, walker(), _dummy(plan.device.gpu), count)
    return family.draft.program(count, plan.results)


def kernels_of(plan: Plan) -> list[Any] | None:
    """What starts each, in their order, None for one that only Triton can start; None while one is not compiled."""
    keys = keys_of(plan)
    return [_compiled[key] for key in keys] if all([key in _compiled for key in keys]) else None


def keys_of(plan: Plan) -> list[tuple]:
    """What the kernel of each launch is compiled for."""
    return [_key(plan.device, step) for step in launches_of(plan)]


def launches_of(plan: Plan) -> list[Launch]:
    return [step for step in plan.steps if isinstance(step, Launch)]


def _fits(plan: Plan, module: Any) -> bool:
    """A group of very many layers does not, nor a plan with a sum of no terms."""
    tensors = len(plan.inputs) + len(plan.results) + 1
    filled = any(isinstance(step, Fill) for step in plan.steps)
    return not filled and tensors <= module.MAX_TENSORS and len(plan.scalars) <= module.MAX_SCALARS


def assemble(plan: Plan, kernels: list[Compiled], module: Any, address: int) -> Any:
    """The Program of this plan; False where a descriptor cannot be encoded here."""
    return Draft(plan, kernels, module, address).program(0, plan.results)


class Draft:
    """The Program of a plan, or those of a family's: what follows from the number of tokens is a function of it. ``count``: for
    how many the kernels were compiled."""

    def __init__(self, plan: Plan, kernels: list[Compiled], module: Any, address: int, count: int = 0):
        places, each = [offset for offset, _ in plan.temporaries], iter(kernels)
        self.plan, self.module, self.owners = plan, module, tuple(c.owner for c in kernels)
        self.steps: list[tuple] = []  # one as far as it is known, what is inside of it and where, and the functions of both
        for step in plan.steps:
            if isinstance(step, Product):
                inside, *others = _product(step, places)
                place, known = 0, [None, *others]
            else:
                assert isinstance(step, Launch)
                of = next(each)
                inside = _params(step, of, places, address)
                place, known = 7, [of.function, *(*step.grid, 1, 1)[:3], of.threads, of.shared, step.pdl, None]
            self.steps.append((*_open(known), place, *_open(inside)) if inside is not None else (None,) * 5)
        self.numbers = [*_numbers(plan).values()]
        self.kinds = self.kinds_at(count)

    def kinds_at(self, count: int) -> list[Any]:
        return [_kind(number.at(count), unaligned) for number, unaligned in self.numbers]

    def serves(self, count: int) -> bool:
        """Whether Triton would compile no other kernels for so many tokens."""
        return self.kinds_at(count) == self.kinds

    def program(self, count: int, results: Sequence[Allocation]) -> Any:
        steps: list[tuple] = []
        for known, open_ones, place, inside, open_inside in self.steps:
            if known is None:
                return False
            known, inside = [*known], [*inside]
            for parts, functions in ((known, open_ones), (inside, open_inside)):
                for i, function in functions:
                    parts[i] = function(count)
                    if parts[i] is None:
                        return False
            known[place] = tuple(inside)
            steps.append(tuple(known))
        allocations = tuple([(a.shape, a.stride, a.dtype) for a in results])
        sizes = len(self.plan.inputs), len(self.plan.scalars), allocations, self.plan.workspace
        return self.module.Program(*sizes, tuple(steps), self.owners, torch.uint8)


def _open(parts: Sequence[Any]) -> tuple[list[Any], list[tuple[int, Any]]]:
    """The parts, and where one follows from the number of tokens, how."""
    parts = [part.at if isinstance(part, Rows) else part for part in parts]
    return parts, [(i, part) for i, part in enumerate(parts) if callable(part)]


def _key(device: Device, step: Launch) -> tuple:
    """Triton's own: dtypes, 16-byte alignment, integers that are 1, divisible by 16 or wide, and all constants."""
    kinds: list[Any] = []
    unaligned = getattr(step.kernel, "do_not_specialize_on_alignment", ())
    for name, a in zip(step.kernel.arg_names, step.args, strict=False):  # the constexprs come last
        if isinstance(a, Array):
            kinds.append((a.dtype, a.aligned))
        elif isinstance(a, Tile):
            kinds.append((a.array.dtype, a.block))
        elif type(a) is int:
            kinds.append(_kind(a, name in unaligned))
        else:
            kinds.append(None if a is None else float)
    return (step.kernel, device.gpu, tuple(kinds), step.constexprs, step.num_warps, step.num_stages, step.pdl)


def _kind(n: int, unaligned: bool) -> Any:
    return 1 if n == 1 else (n > 0x7FFFFFFF, n & 15 == 0 and not unaligned)


def _numbers(plan: Plan) -> dict[tuple, tuple[Rows, bool]]:
    """The arguments of launches that follow from the number of tokens, each once; and whether what 16 divides is no other."""
    found = {}
    for step in launches_of(plan):
        names = getattr(step.kernel, "do_not_specialize_on_alignment", ())
        for name, a in zip(step.kernel.arg_names, step.args, strict=False):
            if isinstance(a, Rows):
                found[a.plus, a.terms, name in names] = a, name in names
    return found


def _place(a: Array, places: list[int]) -> Any:
    """The slot, and the offset in bytes."""
    offset = a.offset * a.itemsize + (places[a.temp] if a.temp >= 0 else 0)
    return (lambda count: (a.slot, offset.at(count))) if isinstance(offset, Rows) else (a.slot, offset)


def _params(step: Launch, compiled: Compiled, places: list[int], address: int) -> tuple | None:
    out: list[Any] = []
    described = iter(compiled.descriptors)
    for kind, a in zip(compiled.types, step.args, strict=False):  # the constexprs come last
        if isinstance(a, Tile):
            t, how = a.array, next(described, None)
            made = None if how is None else _map(how, t, _place(t, places), address)
            if made is None:
                return None
            out.append(made)
            out += [_packed("i32", n) for n in t.shape] + [_packed("i64", n) for n in t.stride]
        elif isinstance(a, Scalar):
            if kind not in ("fp32", "f32"):  # compiled for one value of it, or for its bits as an integer
                return None
            out.append((a.number,))
        elif kind == "constexpr":
            continue
        elif isinstance(a, Array):
            out.append(_place(a, places))
        else:
            out.append(_packed(kind, a))
    return (*out, *[bytes(8)] * compiled.scratch)


def _packed(kind: str, n: Any) -> Any:
    pack = packing(kind)
    return (lambda count: pack(n.at(count))) if isinstance(n, Rows) else pack(n)


def _map(how: dict, t: Array, place: Any, address: int) -> Any:
    """The map of this matrix, its slot and its offset, or what gives them for a number of tokens; None where there is none."""

    pitch = t.stride[0]

    def made(count: int) -> tuple | None:
        down = pitch.at(count) if isinstance(pitch, Rows) else pitch
        room = tensor_map(how, t.dtype, at(t.shape, count), down, address)
        return None if room is None else (room, *(place(count) if callable(place) else place))

    is_fixed = not callable(place) and not any([isinstance(n, Rows) for n in (*t.shape, *t.stride)])
    return made(0) if is_fixed else made


def _product(step: Product, places: list[int]) -> tuple:
    """For a cuBLAS that counts along columns: what lies row by row is a transposed matrix to it, so out^T = b^T a^T."""
    out, a, b = step.out, step.a, step.b
    if out.stride[1] != 1 or (out.stride[0] < out.shape[1] and out.shape[0] > 1):
        out, a, b = out.T, b.T, a.T
    (M, N), K = out.shape, a.shape[1]
    alpha = step.alpha.number if isinstance(step.alpha, Scalar) else -1
    assert alpha >= 0 or step.alpha == 1.0
    (tb, ldb), (ta, lda) = _layout(a), _layout(b)
    numbers = (
        ta,
        tb,
        N,
        M,
        K,
        alpha,
        int(step.accumulate),
        lda,
        ldb,
        max(out.stride[0], N),
        CUDA_TYPE[b.dtype],
        CUDA_TYPE[a.dtype],
        CUDA_TYPE[out.dtype],
        COMPUTE_32F,
    )
    return (numbers, _place(b, places), _place(a, places), _place(out, places))


def _layout(t: Array) -> tuple[int, int]:
    """Whether cuBLAS must transpose it, and the distance from row to row (or column to column)."""
    (rows, columns), (down, right) = t.shape, t.stride
    if (right == 1 or columns == 1) and (down >= columns or rows == 1):
        return 0, max(down if rows > 1 else 1, columns, 1)
    return 1, max(right if columns > 1 else 1, rows, 1)


def _dummy(index: int) -> int:
    if index not in _dummies:
        device = torch.device("cuda", index)
        _dummies[index] = by_another_thread(lambda: torch.empty(256, dtype=torch.uint8, device=device), device)
    return _dummies[index].data_ptr()
