"""What is trained, and how: the arguments of a plan."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from fdora._check import check_positive, fail

E = 2  # bytes of an activation
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# what fdora.quant makes of a weight
WEIGHTS: dict[str, dict[str, Any]] = {"bf16": {}}
WEIGHTS |= {kind: {"kind": kind} for kind in ("nf4", "fp4", "mxfp4", "nvfp4", "int8", "fp8")}
WEIGHTS |= {"nf4_nested": {"kind": "nf4", "nested": True}, "fp8_blocks": {"kind": "fp8", "block": (128, 128)}}
OPTIMIZERS = {"adamw": 2, "sgd": 0, "momentum": 1}  # states of the size and dtype of the parameter


class Adapter(NamedTuple):
    """The name and rank of an adapter to be trained."""

    name: str
    r: int


class Setup(NamedTuple):
    """What is trained, and how. ``length``: tokens of a sequence. ``fuse``: q, k, v and the MLP in one call each,
    as ``use_fdora(model)`` runs them where it can. ``loss_tokens``: of each sequence that reach the head; None: all of them.
    ``packed``: the sequences of a microbatch are one row, with a mask that parts them. ``dropout``: adapters drop their inputs,
    as ``fdora.jobs.train`` does it."""

    length: int
    adapters: tuple[Adapter, ...]
    fuse: bool = False
    checkpointing: bool = False
    loss_tokens: int | None = None
    weights: str = "bf16"
    adapter_bytes: int = 4
    optimizer: str = "adamw"
    microbatches: int = 1
    targets: frozenset[str] = frozenset(LINEARS)
    packed: bool = False
    dropout: bool = False

    def row(self, tokens: int) -> int:
        """Tokens that attention is given as one sequence."""
        return tokens if self.packed else self.length

    @property
    def has_banks(self) -> bool:
        """Several adapters are a bank. So is one in ``fdora.jobs.train``, which alone drops."""
        return self.dropout or len(self.adapters) > 1

    @property
    def width(self) -> int:
        """Rows of A that a layer has: those of the largest rank, for a bank is as wide as that."""
        return max(adapter.r for adapter in self.adapters)

    def adapter_elements(self, N: int, K: int) -> int:
        """Of A, B and m of all adapters on one layer."""
        return len(self.adapters) * (self.width * (N + K) + N)

    def loss_of(self, tokens: int) -> int:
        return tokens if self.loss_tokens is None else tokens * min(self.loss_tokens, self.length) // self.length


def check_setup(setup: Setup) -> Setup:
    positive = {"length": setup.length, "microbatches": setup.microbatches}
    positive |= {f"adapters[{i}]": each.r for i, each in enumerate(setup.adapters)}
    if setup.loss_tokens is not None:
        positive["loss_tokens"] = setup.loss_tokens
    for arg, value in positive.items():
        check_positive("jobs.plan", arg, value, "It is a number of tokens, microbatches or a rank.")
    if not setup.adapters:
        raise fail("jobs.plan", "adapters", "at least one", "none", "Without an adapter nothing is trained.")
    known: dict[str, Collection] = {"weights": WEIGHTS, "optimizer": OPTIMIZERS, "adapter_bytes": (2, 4)}
    for arg, among in known.items():
        if getattr(setup, arg) not in among:
            raise fail("jobs.plan", arg, f"one of {', '.join(map(str, among))}", repr(getattr(setup, arg)), "Take the nearest.")
    if not setup.targets or (unknown := setup.targets.difference(LINEARS)):
        have = ", ".join(sorted(unknown)) if setup.targets else "none"
        raise fail("jobs.plan", "targets", f"some of {', '.join(LINEARS)}", have, "Others are not planned.")
    if setup.fuse and len(setup.adapters) > 1:
        raise fail("jobs.plan", "fuse", "False for several adapters", "True", "dora_linear_multi is a call for each layer.")
    return setup
