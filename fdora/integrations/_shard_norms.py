"""The norms of a model that FSDP2 shards, on the shards: each process those of its rows, all in one call before the forward.

As each unit is gathered every process has all of it, and computes all norms, layer by layer. Rows need no other rows: here
each computes a share, and two collectives, of all A and of all c, do the rest. They run in every forward, whatever a process
has kept: one that left them out alone would have the others wait for ever. So this is asked for, and pays where norms are
dear: many processes, large ranks, few micro-batches.

A layer takes its c while its model's forward runs, or in backward, and only if no shard was changed since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

from fdora._torch import backward_task
from fdora.functional import dora_norm_tree, dora_norm_tree_state
from fdora.integrations._shard import Shard
from fdora.integrations._table import Found


class ShardNorms:
    """``find`` lists the layers whose W, A and B lie in shards now: the same in every process."""

    def __init__(self, find: Callable[[Container[int]], Found]):
        self.find = find
        self.running = False
        self.forget()

    def forget(self) -> None:
        """Nothing refers to a shard any more: torch.utils.swap_tensors, and so model.to, refuses one that somebody does."""
        self.weights: list[tuple[Any, ...]] = []  # which lives as long as its ids are known
        self.known: set[int] = set()
        self.kepts: list[weakref.ref[Any]] = []
        self.shards: list[tuple[Shard, ...]] = []
        self.states: list[tuple[tuple[int, ...], ...]] = []
        self.place: dict[int, int] = {}
        self.norms: Any = None

    def compute(self) -> None:
        found = self.find(self.known)
        weights = [tuple(layer[1:]) for layer in found]
        kepts = [kept() for kept in self.kepts]
        if list(map(identity, weights)) != list(map(identity, self.weights)) or kepts != [layer[0] for layer in found]:
            self.forget()
            self.known = {id(t) for layer in weights for t in layer[:3]}
            self.weights, self.kepts = weights, [weakref.ref(layer[0]) for layer in found]
            self.shards = [tuple(map(Shard, layer[:3])) for layer in weights]
            self.place = {id(layer[0]): i for i, layer in enumerate(found)}
        if not found:
            return
        states = [tuple([each.state() for each in layer]) for layer in self.shards]
        W, pairs, s = [layer[0] for layer in weights], [layer[1:3] for layer in weights], [layer[3] for layer in weights]
        if self.norms is None or [each[0] for each in states] != [each[0] for each in self.states]:
            self.norms = dora_norm_tree_state(W)
        self.states = states
        self.norms = dora_norm_tree(W, pairs, s=s, state=self.norms, gather=True)
        self.running = True

    def c_of(self, kept: Any, W: Any, A: Tensor, s: float) -> Tensor | None:
        """None where the layer computes its own: nobody asked for it, or it is not what lies in the shards."""
        i = self.place.get(id(kept), -1)
        if i < 0 or self.norms is None or self.kepts[i]() is not kept or not (self.running or backward_task() != -1):
            return None
        w, a, _, scale = self.weights[i]
        if scale != s or (W.dtype, A.dtype, W.device, W.shape) != (w.dtype, a.dtype, w.device, w.shape):
            return None
        if any([each.state() != then for each, then in zip(self.shards[i], self.states[i], strict=True)]):
            return None
        c: Tensor = self.norms.c[i]
        return c


def identity(weights: tuple[Any, ...]) -> tuple[Any, ...]:
    return *map(id, weights[:3]), weights[3]
