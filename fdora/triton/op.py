"""A launcher as a compiler, torch.func, a tensor subclass and a dispatch mode must see it: an op with a name and a fake.

Defined straight in torch's dispatcher: torch.library.custom_op wraps an op in Python that checks for aliases and looks for
an autograd formula on every call, two thirds of what a compiled call of ours took on the host. Ours return fresh tensors,
and their formulas are in fdora/autograd: called by name, ``torch.ops.fdora.*`` have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fdora._torch import call_directly, library_of
from fdora.triton.runtime import Builder, Device, Like, Plan
from fdora.triton.runtime.walk import caller, plan_for

# As custom_op has it: a compiler hands over the strides that the fake was given. (torch 2.8 knows only of their order.)
STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
Likes = Sequence[Any]  # of Like and None


@dataclass(eq=False)
class Maker:
    """Makes plans, as a pure function of likes, a device and options, with a function that writes them; and, where there is a
    schema, an op whose launcher makes a plan of its arguments and runs it."""

    write: Callable[..., None]  # is given the builder, the arguments, and then the options
    schema: str  # begins with the op's name; all tensors, and what is neither a tensor nor s, are in the order of ``write``
    title: str  # of plans
    reads: str  # how the builder reads each argument; "s" is the scalar of that name, "rest" what the function reads itself
    results: Callable[..., dict[str, Any]]  # of likes or tensors, and options: (shape, dtype) of each, None if not asked for
    path: str = ""  # where all plans have the same
    has_families: bool = False  # x comes first, and a plan may serve more numbers of tokens than one (runtime/family.py)
    asks: tuple[int, ...] = (0,)  # arguments whose type may be a subclass
    op: Any = None  # torch.ops.fdora.name
    call: Any = None  # what a facade calls, which passes the op by where torch need not see it

    def __post_init__(self) -> None:
        if self.schema:
            divide, many = divided(self.schema), self.schema.endswith("Tensor[]")

            def plan(*args: Any, **kwargs: Any) -> tuple[Plan, tuple, tuple]:
                tensors, options, scalars = divide(*args, **kwargs)
                return plan_for(self, tensors, *options), tensors, scalars

            def fake(*args: Any) -> Any:
                tensors, options, _ = divide(*args)
                found = empty(tensors, self.forms(tensors, *options).values())
                return found if many else found[0]

            self.op = op(self.schema, caller(self, divide, many), fake, plan)
            self.call = caller(self, divide, many, self.asks, self.op)

    def __call__(self, likes: Sequence[Like | None], device: Device, *options: Any) -> Plan:
        plan, given = Builder(self.title, device), iter(self.apart(likes))
        plan.path, plan.forms = self.path, self.forms(likes, *options)
        read = [plan.scalar("s") if kind == "s" else getattr(plan, kind)(next(given)) for kind in self.reads.split()]
        self.write(plan, *read, *options)
        return plan.plan()

    def apart(self, tensors: Sequence[Any]) -> list[Any]:
        """Each, and at the end the list of those that the function reads."""
        given = iter(tensors)
        found = [[*given] if kind == "rest" else next(given) for kind in self.reads.split() if kind != "s"]
        assert not [*given], f"{self.title} reads {self.reads}"
        return found

    def forms(self, tensors: Sequence[Any], *options: Any) -> dict[str, Any]:
        return self.results(*self.apart(tensors), *options)


def planned(*declared: Any, **more: Any) -> Callable[[Callable[..., None]], Maker]:
    """What makes a Maker of the function that it decorates."""
    return lambda write: Maker(write, *declared, **more)


def empty(tensors: Sequence[Any], forms: Iterable[Any]) -> list[Tensor]:
    """Results of these forms, like the first tensor."""
    like = next(t for t in tensors if t is not None)
    return [like.new_empty(form[0], dtype=form[1]) for form in forms if form is not None]


def divided(schema: str) -> Callable[..., tuple[tuple, tuple, tuple]]:
    """Tensors, options and scalars among the arguments of an op: a function written from its schema."""
    names, tensors, options, scalars = [], "", "", ""
    for argument in schema[schema.index("(") + 1 : schema.index(")")].split(", "):
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


def op(schema: str, launcher: Callable, fake: Callable, planned: Callable, mapped: bool = True) -> Any:
    """``torch.ops.fdora.name`` of this launcher; ``mapped`` teaches it torch.func.vmap.

    ``planned(*args)`` begins with the plan that the launcher runs: FlopCounterMode counts its flops.
    """
    name = schema.partition("(")[0]
    full, library = f"fdora::{name}", library_of(name)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
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
