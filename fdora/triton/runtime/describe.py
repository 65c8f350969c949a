"""A plan as text: what runs in which order, on which tiles, and what it costs at least."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch

from fdora._recording import Decoding
from fdora.triton.runtime.plan import Array, Fill, Launch, Plan, Product, Step, Tile


class Row(NamedTuple):
    """One step. ``seconds``: its least time at the GPU's published rates; None where they are not known."""

    what: str
    how: str
    flops: float
    bytes: float
    seconds: float | None


class Described(NamedTuple):
    """A plan without its tensors' places: for people."""

    name: str
    path: str
    steps: tuple[Row, ...]
    workspace: int

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.steps)

    @property
    def bytes(self) -> float:
        return sum(row.bytes for row in self.steps)

    @property
    def seconds(self) -> float | None:
        each = [row.seconds for row in self.steps]
        return None if None in each else float(sum(t for t in each if t is not None))

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.path}"]
        width = max((len(row.what) for row in self.steps), default=0)
        for i, row in enumerate(self.steps, 1):
            lines.append(f"  {i:2}. {row.what:{width}}  {amounts(row)}  {row.how}")
        lines.append(f"      {'in all':{width}}  {amounts(self)}  workspace {size(self.workspace)}")
        return "\n".join(lines)


def describe(plan: Plan | Decoding, rates: Any = None) -> Described:
    """``rates``: with a method ``seconds(flops16, flops32, bytes, full_fp32)``."""
    if isinstance(plan, Decoding):
        return _decoding(plan, rates)
    copied = [(i, like.nbytes) for i in plan.copies if (like := plan.inputs[i]) is not None]
    rows = [_row(f"copy of argument {i}", "made contiguous by torch first", (0, 0, 2 * n, 0), rates) for i, n in copied]
    return Described(plan.name, plan.path, (*rows, *(_step(step, rates) for step in plan.steps)), plan.workspace)


def _decoding(of: Decoding, rates: Any) -> Described:
    dense = of.N * of.K * of.dtype.itemsize
    how = "reads what is stored, writes W; what torch moves between is not counted"
    row = _row("plain torch", how, (0.0, 0.0, float(of.stored + dense), 0.0), rates)
    path = f"{of.kind} ({of.N}, {of.K}) to {str(of.dtype).removeprefix('torch.')}; no kernel reads it here"
    return Described("decoding of W", path, (row,), dense)


def _step(step: Step, rates: Any) -> Row:
    if isinstance(step, Launch):
        what, how, full = step.kernel.__name__, _launch(step), False
    elif isinstance(step, Product):
        (M, K), N = step.a.shape, step.b.shape[1]
        how = f"({M}, {K}) x ({K}, {N}), {_dtype(step.a)}{', added to what is there' if step.accumulate else ''}"
        what, full = "cuBLAS", torch.get_float32_matmul_precision() == "highest"
    else:
        assert isinstance(step, Fill)
        what, how, full = "zeros", f"{step.out.shape}", False
    return _row(what, how, step.cost, rates, full)


def _row(what: str, how: str, cost: Any, rates: Any, full_fp32: bool = False) -> Row:
    flops16, flops32, moved, flops8 = cost
    # tensor cores multiply numbers of 8 bits at twice the rate of half precision
    seconds = None if rates is None else rates.seconds(flops16 + flops8 / 2, flops32, moved, full_fp32)
    return Row(what, how, flops8 + flops16 + flops32, moved, seconds)


def _launch(step: Launch) -> str:
    """grid 132, BLOCK_M 128, BLOCK_N 256, ..., TMA, 8 warps, 3 stages"""
    grid = " x ".join(map(str, step.grid))
    names = step.kernel.arg_names[len(step.args) :]
    tma = ["TMA"] if any(isinstance(a, Tile) for a in step.args) else []
    each = zip(names, step.constexprs, strict=True)
    named = chain.from_iterable(v._asdict().items() if hasattr(v, "_asdict") else [(name, v)] for name, v in each)
    words = [_constant(name, value) for name, value in named if name != "TMA"]
    start = ["starts before the kernel ahead ends"] if step.pdl else []
    return ", ".join(
        [f"grid {grid}", *filter(None, words), *tma, f"{step.num_warps} warps", f"{step.num_stages} stages", *start]
    )


def _constant(name: str, value: Any) -> str:
    """A switch that is on by its name, one that is off (0: nothing of the kind) not at all."""
    if value is True or not value:
        return name if value else ""
    return f"{name} {value}"


def _dtype(t: Array) -> str:
    return str(t.dtype).removeprefix("torch.")


def amounts(row: Any) -> str:
    time = "" if row.seconds is None else f"  {1e6 * row.seconds:9.1f} us"
    return f"{row.flops / 1e9:10.3f} GFLOP  {row.bytes / 2**20:9.2f} MiB{time}"


def size(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"
