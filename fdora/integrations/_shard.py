"""What stands in the place of a base weight while its model does not run, where a framework shards it.

FSDP2: a DTensor. FSDP1 with original parameters: a flat piece. ZeRO-3: the parameter itself, with its piece beside it. What
the layer sees in its forward was gathered from it into memory that comes and goes, and into which torch writes without
counting, so that neither its address nor its version says whether the weight is another.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fdora._torch import PLAIN


class Shard:
    """Refers weakly to its tensors."""

    def __init__(self, param: Tensor):
        self.param = weakref.ref(param)
        self.apart = type(param) not in PLAIN
        self.pieces = [weakref.ref(t) for t in pieces(param)]

    def state(self, gathered: Any) -> tuple[int, ...]:
        """Moves with changes in place of the shard that this was gathered from; empty where it was from none that is known."""
        param = self.param()
        if param is None or (param is gathered and len(self.pieces) == 1):
            return ()
        found = [piece() for piece in self.pieces]
        if any([t is None for t in found]):
            return ()
        return id(param), *[0 if t.is_inference() else t._version for t in found if t is not None]


def pieces(param: Any) -> list[Tensor]:
    """The tensors by whose versions a change is seen: of a DTensor also the local one."""
    if type(param) not in PLAIN and hasattr(param, "to_local"):
        with torch.no_grad():  # where it is the local tensor itself, no view of it
            return [param, param.to_local()]
    piece = getattr(param, "ds_tensor", None)
    return [param] if piece is None else [param, piece]


def watched(before: Shard | None, param: Tensor | None) -> Shard | None:
    """The shard to look at from now on, if this is what stands in the layer between two forwards of its model."""
    known = None if before is None else before.param()
    if param is None or known is param:
        return before
    if before is not None and known is not None and before.apart and type(param) in PLAIN:
        return before  # FSDP2 keeps a unit gathered where it was asked to
    return Shard(param)
