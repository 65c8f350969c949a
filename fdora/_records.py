"""The records that every layer of the library passes on, in the place of argument lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
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
    return 2.0


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float32 for half precision and float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


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


def layers_in(flat: Sequence[Tensor | None]) -> list[Operands]:
    """Operands one behind the other, as layers again."""
    return [Operands(*flat[i : i + WIDTH]) for i in range(0, len(flat), WIDTH)]


WIDTH = len(Operands._fields)


class NormOf(NamedTuple):
    """What a row norm is of, and what it may use."""

    W: Any  # (N, K) tensor; before a backend sees it also a QuantWeight
    A: Tensor  # (r, K)
    B: Tensor  # (N, r)
    s: float
    base_sqnorm: Tensor | None = None  # (N,)
    max_bytes: int | None = None  # beside the inputs; None: as many as are fast


Onto = tuple[Tensor | None, Tensor | None]  # gradients of A and B that another pair of them is added to


class Norms(NamedTuple):
    """The norms of some layers, and what they were computed from."""

    c: Tensor  # one behind the other
    words: Tensor  # (layers, n) int64: the fingerprint of each


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


Parts = tuple[Tensor | None, ...]
# What a backend makes once for all calls like one: x and the operands one behind the other -> each y; the activations that
# are saved, h of a layer or the first four of SavedMlp; and kept and pre_scale as in Saved.
Bound = Callable[[tuple[Tensor | None, ...]], tuple[Sequence[Tensor], Parts, Parts, tuple[bool, ...]]]


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


class Bank(NamedTuple):
    """One layer with G adapters: its tensors beside x, and which tokens are whose.

    Tokens are sorted by adapter, those of none last. x (M, K), y and their gradients are in the caller's order, h is sorted.
    Or nothing is sorted: ids in the place of offsets and order.
    """

    W: Any  # (N, K) tensor; in the dtype of x wherever a backend sees it, or a QuantWeight of e4m3 to multiply as codes
    A: Tensor  # (G, r, K)
    B: Tensor  # (G, N, r)
    m: Tensor | None  # (G, N); None: plain LoRA, g = 1
    c: Tensor | None  # (G, N) float32 or float64, given where m is
    bias: Tensor | None  # (N,)
    s: Tensor  # (G,) float32, float64 beside a float64 x
    offsets: Any  # (G,) int32: where the tokens of each adapter end; those of the first begin at 0
    order: Tensor | None  # (M,) int64: which token stands at a place when they are sorted; None: they came sorted
    ids: Tensor | None  # (M,) int64 or int32: the adapter of each token, out of 0 to G - 1 for none; see Backend.any_order
    seed: Tensor | None  # (G,) int64, None for no dropout; masks count tokens from the start of a segment. (2 G,) with ratios
    ranks: tuple[int, ...] | None  # rows of A and columns of B from here on are not read, their gradients are 0; None: r
    p: float  # of dropout
    experts: bool  # beside a QuantWeight: it is (G N, K), a W for each
    mode: DropoutMode  # of dropout; "peft" only beside seed and m


class BankNeeds(NamedTuple):
    """Which gradients of such a layer are asked for."""

    x: bool
    A: bool
    B: bool
    m: bool
    c: bool
    bias: bool


class Lookup(NamedTuple):
    """What an embedding does, beside its tensors."""

    s: float
    per_row: bool  # m and c of each row of the table, not of each column
    padding_idx: int | None
    max_norm: float | None
    sparse: bool  # the gradients of what has a value for each row of the table


class Conv(NamedTuple):
    """What a convolution does, beside its tensors; a number for each axis of space."""

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    transposed: bool
    output_padding: tuple[int, ...]


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

    def apart(self) -> tuple[Parts, Parts, tuple[bool, ...]]:
        """The activations, and of each layer kept and pre_scale as in :class:`Saved`."""
        h, h_down, gate, up, y, *before = self
        pre_scale = tuple([t is not None for t in before])
        return (h, h_down, gate, up), (before[0], before[1], before[2] if pre_scale[2] else y), pre_scale

    @classmethod
    def joined(cls, parts: Parts, kept: Parts, pre_scale: tuple[bool, ...]) -> SavedMlp:
        """Undo :meth:`apart`."""
        (h, h_down, gate, up), y = parts, None if pre_scale[2] else kept[2]
        of_gate, of_up, of_down = (v if has else None for v, has in zip(kept, pre_scale, strict=True))
        return cls(h, h_down, gate, up, y, of_gate, of_up, of_down)
