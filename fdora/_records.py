"""The records that every layer of the library passes on, in the place of argument lists."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor


def eps() -> float:
    """Floor of c in g = m / c: a row of zeros gets g = m / eps, never 0 / 0.

    A function, because torch.compile(dynamic=True) makes an input of every global float, and two Functions in one graph
    whose forwards read the same one crash Dynamo (torch 2.13).
    """
    return 1e-12


def drowned() -> float:
    """How many times larger than the value before it a column's output may be, in sums of |dy|, to be read back from y - bias.

    Derivation: fdora/eager/linear.py. A function, as eps is.
    """
    return 4.0


DropoutMode = Literal["lora", "peft"]
# What the gradient of m will read; "output" allows the value before g where the output will not do.
SaveForDm = Literal["nothing", "output", "pre_scale"]


class Operands(NamedTuple):
    """The tensors of one layer beside x. Without A it has no adapter."""

    W: Any  # (N, K) tensor; before autograd also a QuantWeight, and None where its tensors come behind
    A: Tensor | None  # (r, K)
    B: Tensor | None  # (N, r)
    m: Tensor | None  # (N,)
    c: Tensor | None  # (N,) float32 or float64; None beside an A: a backend that reads this W's codes forms it
    bias: Tensor | None  # (N,)
    seed: Tensor | None  # () int64: the dropout mask, None for no dropout


class Options(NamedTuple):
    """What one layer does, beside its tensors."""

    s: float
    save: SaveForDm


class Dropout(NamedTuple):
    """The same for all layers of a call. Masks differ: each layer has its seed."""

    p: float
    mode: DropoutMode


class Saved(NamedTuple):
    """What the backward of a call reads beside its operands."""

    h: Tensor | None  # (M, sum of r): x A^T of each layer side by side, or s x A^T where the kernels formed it
    kept: tuple[Tensor | None, ...]  # (M, N) of each layer: what dm reads
    pre_scale: tuple[bool, ...]  # whether that is the value before g, not the output
    norms: tuple[Tensor, ...] = ()  # c of each adapted layer that came without one


class Needs(NamedTuple):
    """Which gradients of one layer are asked for."""

    A: bool
    B: bool
    m: bool
    c: bool
    bias: bool


NO_NEEDS = Needs(False, False, False, False, False)


class Grads(NamedTuple):
    """The gradients of one layer beside dx; bias in float32 or float64."""

    A: Tensor | None = None
    B: Tensor | None = None
    m: Tensor | None = None
    c: Tensor | None = None
    bias: Tensor | None = None


class SavedMlp(NamedTuple):
    """What the backward of a gated MLP reads beside its operands: of gate and up the output, or the value before g."""

    h: Tensor | None  # of gate and up, side by side
    h_down: Tensor | None
    gate: Tensor | None
    up: Tensor | None
    y: Tensor | None
    pre_gate: Tensor | None
    pre_up: Tensor | None
    pre_down: Tensor | None
