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

from fdora._torch import PLAIN, fsdp2_groups, piece_of


class Shard:
    """Refers weakly to its tensors."""

    def __init__(self, param: Tensor):
        self.param = weakref.ref(param)
        self.pieces = [weakref.ref(t) for t in pieces(param)]

    def state(self) -> tuple[int, ...]:
        """Moves with changes in place of what was gathered; empty once that is gone."""
        found = [piece() for piece in self.pieces]
        if any([t is None for t in found]):
            return ()
        return id(found[0]), *[0 if t.is_inference() else t._version for t in found if t is not None]


def pieces(param: Any) -> list[Tensor]:
    """The tensors by whose versions a change is seen, the parameter first; none where it is whole."""
    if type(param) not in PLAIN:
        piece = piece_of(param)
        return [] if piece is None else [param, piece]
    if hasattr(param, "ds_tensor"):
        return [param, param.ds_tensor]
    return [param] if param.dim() == 1 else []  # a flat piece of a matrix


def watched(before: Shard | None, param: Tensor | None) -> Shard | None:
    """The shard to look at from now on, if this is what stands in the layer between two forwards of its model.

    What is whole says nothing: FSDP2 keeps a unit gathered where it was asked to.
    """
    if param is None or (before is not None and before.param() is param) or not pieces(param):
        return before
    return Shard(param)


def gathered_together(model: Any) -> list[list[tuple[Any, Tensor]]]:
    """Of each of FSDP2's groups the modules with a weight, and its shard."""
    if model is None or not torch.distributed.is_available():
        return []
    return [[(module, shard) for module, name, shard in group if name == "weight"] for group in fsdp2_groups(model)]


def lies_in_rows(*shards: Any) -> bool:
    """Whether these are DTensors as FSDP2 keeps them, on the device that computes."""
    if any([piece_of(t) is None or t.device.type != t.device_mesh.device_type for t in shards]):
        return False
    from torch.distributed.tensor import Replicate, Shard

    return all([p == Replicate() or (type(p) is Shard and p.dim == 0) for t in shards for p in t.placements])
