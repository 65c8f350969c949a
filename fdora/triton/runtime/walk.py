"""``run(plan, tensors, scalars)``, and the cache of plans.

The first run of a plan starts its kernels the public way, ``kernel[grid](...)``, which compiles what is new. From then on
walk.c runs it, where native.py can make a Program of it; elsewhere (interpreter, AMD GPUs, an old torch, a profiler that
listens to launches) the walk below does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fdora import _facts, _plain
from fdora._recording import active
from fdora._torch import PLAIN, needs_dispatcher
from fdora.triton.runtime import native
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.family import plan_of
from fdora.triton.runtime.plan import Array, Launch, Like, Plan, Product, Scalar, Tile
from fdora.triton.runtime.private import (
    OPTIONS,
    compiling_in_threads,
    current_device,
    exchange_device,
    has_launch_hooks,
    raw_stream,
    usual_math,
    walker,
)

MAX_PLANS = 4096  # sequences of any length make new plans, up to 9 kB each with its program: the oldest go

_plans: dict[tuple, Plan] = {}
_lock = Lock()  # a dict that grows while another thread looks for its oldest raises
Maker = Callable[..., Plan]  # (likes, device, *options) -> Plan, pure


def like(t: Tensor | None) -> Like | None:
    if t is None:
        return None
    has_address = type(t) in PLAIN and not t.is_meta
    at = t.data_ptr() if has_address else t.storage_offset() * t.itemsize
    return Like(tuple(t.shape), t.stride(), t.dtype, at % 16 == 0)


def ready() -> bool:
    """From now on ask walk.c for facts, where there is one; whether it was not asked before. Its keys are other ones."""
    if _facts.facts is not _facts.python_facts or (module := walker()) is None:
        return False
    _facts.use(module.facts, module.places)
    _plain.use(module.follow, module.unchanged, module.operands)
    return True


def plan_for(maker: Maker, tensors: tuple[Tensor | None, ...], *options: Any) -> Plan:
    """The plan of this call: made once for all calls with the same facts and options. Not for subclasses of Tensor."""
    key = (maker, _facts.facts(tensors), options)
    plan = _plans.get(key)
    if plan is None:
        if (noted := active()) is not None:
            return plan_of(maker, tuple(map(like, tensors)), noted.device, options)
        if ready():
            return plan_for(maker, tensors, *options)
        first = next(t for t in tensors if t is not None)
        plan = plan_of(maker, tuple(map(like, tensors)), device_of(first.device), options)
        if key[1] is not None:
            with _lock:
                if len(_plans) >= MAX_PLANS:
                    _plans.pop(next(iter(_plans)), None)
                _plans[key] = plan
    return plan


def run(plan: Plan, tensors: tuple[Tensor | None, ...], scalars: tuple[float, ...] = ()) -> tuple[Tensor, ...]:
    """The results of the plan, in its order."""
    gpu, program = plan.device.gpu, plan.native
    if program and not plan.copies and current_device() == gpu and walks_in_c(plan):
        return program.run(tensors, scalars, raw_stream(gpu))
    if (noted := active()) is not None:
        return noted.run(plan)
    if plan.copies:
        # clone: contiguous() gives back one row at any address, where the plan counts on an aligned one
        whole = torch.contiguous_format
        tensors = tuple(
            t.clone(memory_format=whole) if i in plan.copies and t is not None else t for i, t in enumerate(tensors)
        )
    if gpu < 0 or current_device is None:
        return _walk(plan, tensors, scalars)
    before = current_device()
    if before == gpu:
        return _run(plan, tensors, scalars)
    exchange_device(gpu)
    try:
        return _run(plan, tensors, scalars)
    finally:
        exchange_device(before)


def caller(maker: Maker, divide: Callable, many: bool, asks: tuple[int, ...] = (), op: Any = None) -> Callable[..., Any]:
    """Return what makes the plan of a call and runs it. ``divide`` finds tensors, options and scalars among the arguments.
    ``many``: all results, not the first. Where torch must see the call, which the type of an argument in ``asks`` may say,
    ``op`` takes it."""

    def call(*args: Any) -> Any:
        for i in asks:
            if needs_dispatcher(args[i]):
                return op(*args)
        tensors, options, scalars = divide(*args)
        results = run(plan_for(maker, tensors, *options), tensors, scalars)
        return results if many else results[0]

    return call


def _run(plan: Plan, tensors: tuple[Tensor | None, ...], scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
    program = plan.native
    if program is None:
        program = plan.native = native.program(plan)  # None while a kernel is not compiled
    if program and walks_in_c(plan):
        return program.run(tensors, scalars, raw_stream(plan.device.gpu))
    return _walk(plan, tensors, scalars)


def walks_in_c(plan: Plan) -> bool:
    return not has_launch_hooks() and (not plan.has_products or usual_math())


def _walk(plan: Plan, tensors: Sequence[Tensor | None], scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
    scalars = tuple(map(float, scalars))  # an int would be compiled as one, and a 1 into the kernel
    first = next(t for t in tensors if t is not None)
    device = first.device
    results = tuple(torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device) for a in plan.results)
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=device) if plan.temporaries else None
    slots: tuple[Tensor | None, ...] = (*tensors, *results, workspace)

    def tensor(a: Array) -> Tensor:
        base = slots[a.slot]
        assert base is not None
        begin = plan.temporaries[a.temp][0] if a.temp >= 0 else base.storage_offset() * base.element_size()
        start = begin + a.offset * a.itemsize
        return torch.empty(0, dtype=a.dtype, device=device).set_(base.untyped_storage(), start // a.itemsize, a.shape, a.stride)

    def argument(a: Any) -> Any:
        return _argument(a, tensor, scalars.__getitem__)

    for step in plan.steps:
        if isinstance(step, Launch):
            args = [argument(a) for a in step.args]
            built = step.kernel[step.grid](*args, *step.constexprs, **_options(step))
            if not any(map(native.is_more_aligned, step.args, args)):  # else compiled for more than its key says
                native.remember(plan.device, step, built)
        elif isinstance(step, Product):
            _product(tensor(step.out), tensor(step.a), tensor(step.b), argument(step.alpha), step.accumulate)
        else:
            tensor(step.out).zero_()
    return results


def _argument(a: Any, tensor: Callable[[Array], Tensor], scalar: Callable[[int], float]) -> Any:
    if isinstance(a, Array):
        return tensor(a)
    if isinstance(a, Tile):
        return TensorDescriptor(tensor(a.array), list(a.array.shape), list(a.array.stride), list(a.block))
    return scalar(a.number) if isinstance(a, Scalar) else a


def _options(step: Launch) -> dict[str, Any]:
    return OPTIONS | {"num_warps": step.num_warps, "num_stages": step.num_stages} | ({"launch_pdl": True} if step.pdl else {})


def compile_launches(launches: Iterable[Launch]) -> None:
    """What :func:`run` would have compiled one by one, for the current GPU and in threads, while the next is looked for."""

    def bare(a: Array) -> Tensor:
        skipped = 0 if a.aligned else 1
        return torch.empty(skipped + 1, dtype=a.dtype, device="meta")[skipped:]

    with compiling_in_threads():
        for step in launches:
            args = [_argument(a, bare, float) for a in step.args]  # any scalars
            step.kernel.warmup(*args, *step.constexprs, grid=step.grid, **_options(step))


def _product(out: Tensor, a: Tensor, b: Tensor, alpha: float, accumulate: bool) -> None:
    if out.dtype == a.dtype:
        out.addmm_(a, b, beta=1.0 if accumulate else 0.0, alpha=alpha)
        return
    assert out.dtype == torch.float32  # torch has no other on a GPU
    wide = torch.mm(a, b, out_dtype=out.dtype) if a.is_cuda else a.to(out.dtype) @ b.to(out.dtype)
    wide = wide if alpha == 1 else wide.mul_(alpha)
    out.add_(wide) if accumulate else out.copy_(wide)
