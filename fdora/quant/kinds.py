"""What a kind of quantised weight is: the names of its tensors, and how they are decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fdora._check import fail

if TYPE_CHECKING:
    from fdora.quant.weight import QuantWeight

Decode = Callable[["QuantWeight", int, int], Tensor]


class Kind(NamedTuple):
    """A registered format: its name, its decoder, and the names of its tensors."""

    name: str
    dequantize: Decode
    tensors: tuple[str, ...]
    by_rows: bool


KINDS: dict[str, Kind] = {}


def register_kind(name: str, *, dequantize: Decode, tensors: tuple[str, ...] = (), by_rows: bool = True) -> Kind:
    """Teach fdora a format: ``W[i:j] = dequantize(weight, i, j)``.

    Args:
      name: of the kind, as in ``QuantWeight.kind``; a name that is taken is an error, unless all of it is the same.
      dequantize: gives rows i to j (at least one) of ``weight``, (j - i, K), in the dtype in which the format is
        decoded (float32 for most), as a new tensor, in plain torch with no dependence on values, for compilers.
      tensors: names of ``weight.tensors``, in order; those at the end may be missing in a weight.
      by_rows: whether some rows cost less than all of them.

    Returns:
      The ``Kind``.

    Raises:
      FdoraError: another kind has that name.

    Memory: keeps ``dequantize`` for good.
    References: none.
    """
    kind = Kind(name, dequantize, tuple(tensors), by_rows)
    if KINDS.setdefault(name, kind) != kind:
        raise fail("quant.register_kind", "name", "new", repr(name), "Choose another name.")
    return kind


def kind_of(name: str) -> Kind:
    found = KINDS.get(name)
    if found is None:
        known = ", ".join(sorted(KINDS))
        raise fail("quant.QuantWeight", "kind", f"one of {known}", repr(name), "Teach it with fdora.quant.register_kind.")
    return found
