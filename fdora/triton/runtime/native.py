"""A plan whose kernels are compiled, as one object of walk.c that launches them all."""

from __future__ import annotations

from typing import Any

import torch

from fdora.triton.runtime.device import INTERPRETED, Device, by_another_thread
from fdora.triton.runtime.plan import Array, Fill, Launch, Plan, Product, Scalar, Tile
from fdora.triton.runtime.private import (
    COMPUTE_32F,
    CUDA_TYPE,
    Compiled,
    look_into,
    packed,
    tensor_map,
    walker,
)

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
    if not _AVAILABLE or walker() is None or not _fits(plan, walker()):
        return False
    found: list[Compiled | None] = []
    for key in keys_of(plan):
        if key not in _compiled:
            return None
        found.append(_compiled[key])
    if None in found:
        return False
    return assemble(plan, [c for c in found if c is not None], walker(), _dummy(plan.device.gpu))


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
    places = [offset for offset, _ in plan.temporaries]
    each = iter(kernels)
    steps: list[tuple] = []
    for step in plan.steps:
        if isinstance(step, Product):
            steps.append(_product(step, places))
            continue
        assert isinstance(step, Launch)
        compiled = next(each)
        params = _params(step, compiled, places, address)
        if params is None:
            return False
        grid = (*step.grid, 1, 1)[:3]
        steps.append((compiled.function, *grid, compiled.threads, compiled.shared, step.pdl, params))
    allocations = tuple((a.shape, a.stride, a.dtype) for a in plan.results)
    owners = tuple(c.owner for c in kernels)
    return module.Program(len(plan.inputs), len(plan.scalars), allocations, plan.workspace, tuple(steps), owners, torch.uint8)


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
            kinds.append(1 if a == 1 else (a > 0x7FFFFFFF, a & 15 == 0 and name not in unaligned))
        else:
            kinds.append(None if a is None else float)
    return (step.kernel, device.gpu, tuple(kinds), step.constexprs, step.num_warps, step.num_stages, step.pdl)


def _place(a: Array, places: list[int]) -> tuple[int, int]:
    return a.slot, a.offset * a.itemsize + (places[a.temp] if a.temp >= 0 else 0)


def _params(step: Launch, compiled: Compiled, places: list[int], address: int) -> tuple | None:
    out: list[Any] = []
    described = iter(compiled.descriptors)
    for kind, a in zip(compiled.types, step.args, strict=False):  # the constexprs come last
        if isinstance(a, Tile):
            t, how = a.array, next(described, None)
            room = None if how is None else tensor_map(how, t.dtype, t.shape, t.stride[0], address)
            if room is None:
                return None
            out.append((room, *_place(t, places)))
            out += [packed("i32", n) for n in t.shape] + [packed("i64", n) for n in t.stride]
        elif isinstance(a, Scalar):
            if kind not in ("fp32", "f32"):  # compiled for one value of it, or for its bits as an integer
                return None
            out.append((a.number,))
        elif kind == "constexpr":
            continue
        elif isinstance(a, Array):
            out.append(_place(a, places))
        else:
            out.append(packed(kind, a))
    return (*out, *[bytes(8)] * compiled.scratch)


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
