"""A quantised W in the nodes of autograd: its packed tensors are what is saved, and W is dense only while products read it.

A backend that reads the codes of a format gets the QuantWeight, and decodes it in its own plan; else W is decoded here.

A node's flat operands (fdora/_records.py) are tensors. Where some W is quantised, its place holds None, and the packed tensors
of all such W follow behind the operands; ``specs`` says whose they are and how they are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._records import WIDTH, Operands, layers_in
from fdora.autograd._ops import OPS
from fdora.quant import QuantSpec, QuantWeight

Specs = tuple[QuantSpec | None, ...] | None  # one for each layer; None where every W is a tensor


def specs_of(layers: Sequence[Operands]) -> Specs:
    found = tuple([la.W.spec if isinstance(la.W, QuantWeight) else None for la in layers])
    return None if not any([spec is not None for spec in found]) else found


def flat_of(layers: Sequence[Operands], specs: Specs) -> Iterator[Tensor | None]:
    if specs is None:
        for la in layers:
            yield from la
        return
    for la, spec in zip(layers, specs, strict=True):
        yield from la if spec is None else with_weight(la, None)
    for la in layers:
        if isinstance(la.W, QuantWeight):
            yield from la.W.tensors


def with_weight(la: Operands, W: Any) -> Operands:
    """Dynamo of torch 2.8 traces neither ``_replace`` and ``_make`` nor a slice of a NamedTuple."""
    return Operands(W, la.A, la.B, la.m, la.c, la.bias, la.seed)


def layers_of(flat: Sequence[Any], specs: Specs) -> list[Operands]:
    """The operands again, a quantised W as a value."""
    if len(flat) == WIDTH:
        return [Operands(*flat)]
    if specs is None:
        return layers_in(flat)
    layers, at = [], WIDTH * len(specs)
    for i, spec in enumerate(specs):
        la = Operands(*flat[i * WIDTH : (i + 1) * WIDTH])
        if spec is not None:
            la = with_weight(la, spec.weight(flat[at : at + spec.count]))
            at += spec.count
        layers.append(la)
    return layers


def readable(layers: Sequence[Operands], dtype: torch.dtype, backend: str) -> Sequence[Operands]:
    """As the backend takes them: a W that it cannot read is dense, in the dtype of the products."""
    return [
        la if not isinstance(la.W, QuantWeight) or is_decoded(la.W.spec, backend) else with_weight(la, la.W.dequantize(dtype))
        for la in layers
    ]


def forms_norm(W: Any, backend: str) -> bool:
    """Whether a layer of this W may come without its norm: the plan that decodes W forms it in the same pass."""
    return isinstance(W, QuantWeight) and W.dtype != torch.float64 and is_decoded(W.spec, backend)


def norm_beside(x: Tensor, W: Any, A: Tensor, B: Tensor, backend: str) -> bool:
    """Whether a layer of a dense W may come without its norm: the pass over W that few tokens take forms it."""
    fits = OPS[backend].norm_inside
    return fits is not None and fits(x, W, A, B)


def without_norm(flat: Sequence[Any], count: int) -> list[int]:
    """Where in the flat operands of so many layers the norms belong that a forward formed."""
    return [i + 4 for i in range(0, count * WIDTH, WIDTH) if flat[i + 1] is not None and flat[i + 4] is None]


def dense_in(spec: QuantSpec, tensors: Sequence[Any], dtype: torch.dtype, backend: str) -> Tensor:
    """W in the dtype of the products."""
    decode = OPS[backend].dense_of
    found = None if decode is None else decode(spec, tensors, dtype)
    return spec.weight(tensors).dequantize(dtype) if found is None else found


def is_decoded(spec: QuantSpec, backend: str) -> bool:
    known = OPS[backend].is_decoded
    return known is not None and known(spec)
