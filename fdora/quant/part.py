"""Some rows of a quantised weight as a weight of their own: one expert of a stack. It keeps the tensors of the whole."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fdora.quant.weight import QuantSpec, QuantWeight, kind_of, read_as, register_kind

KIND = "rows"


class Part(NamedTuple):
    """The facts of the kind: which weight, and its first row here."""

    whole: QuantSpec
    first: int


def decode(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, _ = read_as(W, Part, 0)
    whole = facts.whole.weight(W.tensors)
    return kind_of(whole.kind).dequantize(whole, facts.first + first, facts.first + last)


register_kind(KIND, dequantize=decode)


def experts_of(W: QuantWeight, experts: int) -> tuple[QuantWeight, ...]:
    """A stack of (E N, K) as E weights (N, K). Nothing is copied."""
    N, K = W.shape[0] // experts, W.shape[1]
    return tuple(QuantWeight(KIND, W.tensors, (N, K), W.dtype, Part(W.spec, e * N)) for e in range(experts))
