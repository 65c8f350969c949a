"""Kernels compiled before a step needs them: a call is recorded for every number of tokens, and run with few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from time import perf_counter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fdora.autograd._ops import load_kernels
from fdora.functional.backend import select_backend
from fdora.functional.explain import record, without_data

APART = 8  # of the numbers of tokens: a few of all sizes first find nearly all kernels, which are compiled during the rest


class Warmup(NamedTuple):
    """What a warm-up did."""

    seconds: float
    kernels: int
    """How many it compiled, or read from Triton's cache on disk."""


class Ahead(NamedTuple):
    """A call that a model makes, ``fn(x, *args, **kwargs)``, but for its x, which is like W and has so many columns."""

    fn: Callable[..., Any]
    W: Any
    columns: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def form(self) -> tuple[Any, ...]:
        """What its plans look at."""

        def seen(leaf: Any) -> Any:
            return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else getattr(leaf, "spec", leaf)

        return self.fn, *map(seen, optree.tree_leaves((self.args, self.kwargs)))  # type: ignore[arg-type]

    def x(self, tokens: int) -> Tensor:
        """One sequence: its plans are those of the calls to come, which need not write them."""
        return torch.zeros(1, tokens, self.columns, dtype=self.W.dtype, device=self.W.device, requires_grad=True)

    def run(self, tokens: int) -> None:
        """Forward and backward; no ``grad`` is touched."""
        x = self.x(tokens)
        ys = optree.tree_leaves(self.fn(x, *self.args, **self.kwargs))
        given: Any = (x, *self.args)
        trained = [t for t in optree.tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.grad(ys, trained, list(map(torch.zeros_like, ys)), allow_unused=True)

    def kernels(self, tokens: int) -> dict[Any, Any]:
        """All launches in either direction, by what Triton compiles a kernel of its own for."""
        call = signature(self.fn).bind(self.x(tokens), *self.args, **self.kwargs)
        call.apply_defaults()
        triton, _ = load_kernels()
        device, autocast = without_data(call)
        noted, *_ = record(self.fn, call, triton.device.device_of(device), autocast)
        native = triton.native
        return {k: v for plan in noted.plans for k, v in zip(native.keys_of(plan), native.launches_of(plan), strict=True)}


def compile_ahead(calls: Iterable[Ahead], tokens: Iterable[int], bar: Callable[..., Iterable[Any]]) -> Warmup:
    """Runs each call with those of these numbers of tokens that start a kernel which none before it has started; compiles
    all of these kernels first, at the same time."""
    begun, known, runs = perf_counter(), set[Any](), list[tuple[Ahead, int]]()
    served = [call for call in calls if select_backend(call.W).name == "triton"]
    if not served:
        return Warmup(0.0, 0)
    # Rows of a tile are a multiple of 16, and Triton looks at what 16 divides and at 1: the others run what these do.
    counts = {(count // 16, count % 16 == 0, count == 1): count for count in sorted({*tokens})}.values()

    def new() -> Iterator[Any]:
        calls = [(call, count) for call in served for count in reversed(counts)]
        early = [each for first in range(APART) for each in calls[first::APART]]
        for call, count in bar(early, "kernels"):
            found = {key: launch for key, launch in call.kernels(count).items() if key not in known}
            if found:
                known.update(found)
                runs.append((call, count))
                yield from found.values()

    triton, _ = load_kernels()
    triton.walk.compile_launches(new())
    for call, count in runs:
        call.run(count)
    return Warmup(perf_counter() - begun, len(known))
