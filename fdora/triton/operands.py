"""The operands of the layers of a call: as one flat list, as arrays of a plan, as a compiler takes them.

Seven for each layer, in the order of Operands. Where some W is codes its place holds None and its tensors follow behind all
operands; strings and numbers beside the list (codes.py) say whose they are. A layer with an adapter and no c gets its norm from
the plan that decodes its W: one of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import WIDTH, Operands, layers_in
from fdora.quant import QuantSpec, QuantWeight
from fdora.triton.codes import coded_of, packed, tensors_of, weights_of, written
from fdora.triton.op import Likes
from fdora.triton.runtime.builder import Builder, numbered


def flat(layers: Sequence[Operands]) -> list[Tensor | None]:
    """All operands; behind them the tensors of each W of codes, whose place holds None.

    A list: Dynamo (torch 2.11) hands no NamedTuple to an op.
    """
    operands: list[Any] = [*layers[0]] if len(layers) == 1 else [t for la in layers for t in la]
    if any([type(la.W) is QuantWeight for la in layers]):
        for i, la in enumerate(layers):
            if type(la.W) is QuantWeight:
                operands[WIDTH * i] = None
                operands += tensors_of(la.W.tensors)
    return operands


def facts(layers: Sequence[Operands]) -> tuple[list[str], list[int]]:
    """Of each W that is codes."""
    return written([coded_of(la.W) if type(la.W) is QuantWeight else None for la in layers])


def facts_of(specs: Sequence[QuantSpec | None]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The same, as a plan takes them; empty where every W is a tensor."""
    text, numbers = written([None if spec is None else coded_of(spec) for spec in specs])
    return tuple(text), tuple(numbers)


def with_norms(operands: Sequence[Any], c: Sequence[Tensor]) -> list[Any]:
    """The same layers, none of which had its c."""
    found = [*operands]
    found[4 : WIDTH * len(c) : WIDTH] = c
    return found


def any_norms(operands: Sequence[Any]) -> list[Tensor]:
    """For who only counts flops."""
    return [W.new_empty(W.shape[0], dtype=torch.float32) for W in operands[::WIDTH]]


def forms_norm(la: Any) -> bool:
    return la.A is not None and la.c is None


def described(likes: Likes, count: int, text: Sequence[str] = (), numbers: Sequence[int] = ()) -> list[Any]:
    """The layers of flat operands, likes or tensors; a W of codes as what is known of it."""
    layers = layers_in(likes[: WIDTH * count])
    known = weights_of(text, numbers) or [None] * count
    return [la if W is None else la._replace(W=W) for la, W in zip(layers, known, strict=True)]


def norm_forms(layers: Sequence[Any]) -> dict[str, Any]:
    """The results that are norms nobody gave."""
    return numbered("c", [((la.W.shape[0],), torch.float32) if forms_norm(la) else None for la in layers])


# in a plan


def read_layers(
    plan: Builder, dtype: torch.dtype, likes: Likes, count: int, text: Sequence[str] = (), numbers: Sequence[int] = ()
) -> list[Any]:
    """The last arguments of a plan: the operands of so many layers, then the tensors of each W of codes."""
    layers = [_read_layer(plan, dtype, likes[WIDTH * i : WIDTH * (i + 1)]) for i in range(count)]
    at = WIDTH * count
    for i, W in enumerate(weights_of(text, numbers)):
        if W is not None:
            layers[i] = layers[i]._replace(W=packed(plan, likes[at : at + W.tensors], W))
            at += W.tensors
    return layers


def _read_layer(plan: Builder, dtype: torch.dtype, likes: Likes) -> Any:
    W, A, B, m, c, bias, seed = likes
    weight = plan.operand(W) if dtype == torch.float32 else plan.matrix(W)
    parts: Any = (weight, *map(plan.operand, (A, B)), *map(plan.vector, (m, c, bias)), plan.matrix(seed))
    return Operands(*parts)
