"""Layers whose parameters a framework shards, read whole where the layer runs. Tensor parallelism: mesh.py.

unit of more than   FSDP gathers it before the layer runs; its parts are ordinary modules then. Nothing to do, but under FSDP1
one leaf            with original parameters, where W is a view of a flat parameter that is trained.
leaf                A, B or m as a unit of its own (PEFT's policy for FSDP1, Axolotl and LLaMA-Factory under FSDP2) is gathered
                    only while it is called, and its gradient is reduced by that call's backward. So it is called, and gives
                    its weight: a copy, because the gathered memory goes. Every rank does so in the same order.
ZeRO-3              reading a parameter gathers it, and makes it one of the layer's own, backward included. DeepSpeed's hooks
                    on the layer's parts serve calls of these, of which there are none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, distributed, nn

from fdora._torch import is_traced

LISTENED = "hooks on the layer's parts"
SHARDERS = ("torch.distributed.fsdp.", "torch.distributed._composable.fsdp.", "deepspeed.")
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Leaf(NamedTuple):
    """A part of a layer that holds one weight, or the unit of FSDP around it."""

    part: nn.Module
    inner: nn.Module
    gathered: bool
    """Whether calling ``part`` gathers the weight, and nothing else does. FSDP2 makes a unit of the part itself."""

    def weight(self) -> Tensor:
        """Of a unit of FSDP with a gradient that the unit reduces."""
        inner: Any = self.inner
        if not self.gathered:
            return inner.weight
        inner.__dict__["forward"] = lambda: inner.weight.clone()
        try:
            return self.part()
        finally:
            del inner.__dict__["forward"]


def modules_of(module: Any, name: str) -> tuple[Any, Any, Any]:
    """The modules that hold A, B and m of one adapter."""
    return module.lora_A[name], module.lora_B[name], module.lora_magnitude_vector[name]


def weight_of(part: Any) -> Tensor:
    """As it lies there now."""
    weight: Tensor = part.weight
    return weight


def gather(part: nn.Module) -> Tensor:
    """The same, where it is a unit of FSDP alone by a call of it."""
    for kind in (nn.Linear, DoraLinearLayer):  # no name bound inside a comprehension: Dynamo of torch 2.11 cannot trace one
        found = leaf(part, kind)
        if isinstance(found, Leaf):
            return found.weight()
    return weight_of(part)


def leaf(part: nn.Module, kind: Any) -> Leaf | str:
    """Or why its weight cannot be read in the place of a call of it."""
    if listened(part):
        return LISTENED
    if type(part) is kind:
        return Leaf(part, part, False)
    inner = None if is_traced() or not distributed.is_available() else inside(part, kind)
    return f"a {type(part).__name__} in the place of a {kind.__name__}" if inner is None else Leaf(part, inner, True)


def inside(part: nn.Module, kind: Any) -> nn.Module | None:
    """The module of exactly this class that FSDP made a unit of, alone; None where ``part`` is anything else."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(part, FSDPModule):
        return part if type(part).__bases__ == (FSDPModule, kind) else None
    if type(part) is not FullyShardedDataParallel:
        return None
    inner: nn.Module = part.module
    return inner if type(inner) is kind and not listened(inner) else None


def gathers(model: nn.Module) -> tuple[int, int]:
    """All-gathers of a forward and backward through FSDP's units, and how many of them are for parts of layers alone.

    Each unit is gathered in forward and again in backward, but for the outermost, be it this model or around it.
    """
    if not distributed.is_available():
        return 0, 0
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = [m for m in model.modules() if isinstance(m, (FSDPModule, FullyShardedDataParallel))]
    if not units:
        return 0, 0
    parts = [part for m in model.modules() if isinstance(m, LoraLayer) for name in PARTS for part in getattr(m, name).values()]
    leaves = {id(part) for part in parts if isinstance(part, (FSDPModule, FullyShardedDataParallel))}
    return 1 + 2 * sum(unit is not model for unit in units), 2 * len(leaves)


def listened(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward, beside gathering what is sharded."""
    d = module.__dict__
    if "forward" in d:
        return True
    return any([not of_sharder(f) for hooks in HOOKS for f in d[hooks].values()])


def of_sharder(f: Any) -> bool:
    """Whether a hook was made by what shards parameters: a method of its state, or a function inside of one of its own."""
    f = getattr(f, "func", f)
    where = getattr(type(f.__self__) if hasattr(f, "__self__") else f, "__module__", "") or ""
    return where.startswith(SHARDERS)
