"""A launcher as a compiler, torch.func, a tensor subclass and a dispatch mode must see it: an op with a name and a fake.

Defined straight in torch's dispatcher: torch.library.custom_op wraps an op in Python that checks for aliases and looks for
an autograd formula on every call, two thirds of what a compiled call of ours took on the host. Ours return fresh tensors,
and their formulas are in fdora/autograd: called by name, ``torch.ops.fdora.*`` have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fdora._torch import call_directly, library_of
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.plan import Like, Plan
from fdora.triton.runtime.walk import Maker, caller, plan_for

# As custom_op has it: a compiler hands over the strides that the fake was given. (torch 2.8 knows only of their order.)
STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
Likes = Sequence[Any]  # of Like and None


def maker(name: str, reads: str, path: str = "", has_families: bool = False) -> Callable[[Callable[..., None]], Maker]:
    """Return what makes the maker of a plan of this name out of a function that writes it.

    The function is given the builder, the arguments, and then the options. ``reads`` says how the builder reads each argument,
    in order; ``s`` stands for the scalar of that name and ``rest``, at the end, for the likes of whatever arguments follow,
    which the function reads. ``path``: where all of its plans have the same. ``has_families``: its first argument has tokens,
    and a plan may serve more numbers of them than one (runtime/family.py).
    """
    kinds = reads.split()

    def made_by(write: Callable[..., None]) -> Maker:
        def make(likes: Sequence[Like | None], device: Device, *options: Any) -> Plan:
            plan, given = Builder(name, device), iter(likes)
            read: list[Any] = []
            for kind in kinds:
                if kind == "s":
                    read.append(plan.scalar("s"))
                else:
                    read.append([*given] if kind == "rest" else getattr(plan, kind)(next(given)))
            assert not [*given], f"{name} reads {reads}"
            plan.path = path
            write(plan, *read, *options)
            return plan.plan()

        update_wrapper(make, write)
        del make.__wrapped__  # type: ignore[attr-defined]  # its signature is another one
        make.has_families = has_families  # type: ignore[attr-defined]
        return make

    return made_by


def planned(
    name: str, schema: str, maker: Maker, results: Callable, asks: tuple[int, ...] = (0,)
) -> tuple[Any, Callable[..., Any]]:
    """An op whose launcher makes a plan and runs it: ``torch.ops.fdora.name``, and what a facade calls, which passes the op by
    where torch need not see it.

    The plan's maker is given all tensors of the call in the order of ``schema``, and then, in that order, whatever is neither a
    tensor nor s, the scalars of the plan. ``results`` takes what the op takes and says of each result its shape and dtype, or
    None of what is not asked for; of one that is no list it says just that. ``asks``: arguments whose type may be a subclass.
    """
    divide = _divided(schema)
    many = schema.endswith("Tensor[]")

    def plan(*args: Any, **kwargs: Any) -> tuple[Plan, tuple, tuple]:
        tensors, options, scalars = divide(*args, **kwargs)
        return plan_for(maker, tensors, *options), tensors, scalars

    def fake(*args: Any) -> Any:
        like = args[0] if isinstance(args[0], Tensor) else args[0][0]
        forms = results(*args)
        made = [like.new_empty(form[0], dtype=form[1]) for form in (forms if many else [forms]) if form is not None]
        return made if many else made[0]

    found = op(name, schema, caller(maker, divide, many), fake, plan)
    return found, caller(maker, divide, many, asks, found)


def _divided(schema: str) -> Callable[..., tuple[tuple, tuple, tuple]]:
    """Tensors, options and scalars among the arguments of an op: a function written from its schema."""
    names, tensors, options, scalars = [], "", "", ""
    for argument in schema[1 : schema.index(")")].split(", "):
        kind, with_default = argument.split(" ")
        names.append(with_default)
        name, many = with_default.partition("=")[0], kind.endswith("[]")
        if kind.startswith("Tensor"):
            tensors += f"*{name}, " if many else f"{name}, "
        elif name == "s":
            scalars = "*s, " if many else "s, "
        else:
            options += f"tuple({name}), " if many else f"{name}, "
    divide: Callable = eval(f"lambda {', '.join(names)}: (({tensors}), ({options}), ({scalars}))")  # as a namedtuple is
    return divide


def op(name: str, schema: str, launcher: Callable, fake: Callable, planned: Callable, mapped: bool = True) -> Any:
    """``torch.ops.fdora.name`` of this launcher; ``mapped`` teaches it torch.func.vmap.

    ``planned(*args)`` begins with the plan that the launcher runs: FlopCounterMode counts its flops.
    """
    full, library = f"fdora::{name}", library_of(name)
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    many = schema.endswith("Tensor[]")  # torch wants a list
    run: Callable = (lambda *args: list(launcher(*args))) if many else launcher
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=library)
    found = getattr(torch.ops.fdora, name).default
    call_directly(found, run)
    _count_flops(getattr(torch.ops.fdora, name), planned)
    if mapped:
        _loop_over_batch(full, found, library)
    return found


def _count_flops(packet: Any, planned: Callable) -> None:
    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(planned(*args, **kwargs)[0].cost.flops)

    flop_registry.pop(packet, None)  # of an import before this one
    register_flop_formula(packet, get_raw=True)(formula)


def _loop_over_batch(name: str, op: Any, library: torch.library.Library) -> None:
    """One call per mapped element, the results stacked."""

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple:
        results = [op(*(_element(a, d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return [torch.stack(column) for column in zip(*results, strict=True)], [0] * len(results[0])

    torch.library.register_vmap(name, rule, lib=library)


def _element(a: Any, dims: Any, i: int) -> Any:
    if isinstance(dims, (list, tuple)):
        return [_element(each, d, i) for each, d in zip(a, dims, strict=True)]
    return a if dims is None or not isinstance(a, Tensor) else a.select(dims, i)
