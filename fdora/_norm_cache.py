"""The norms of some layers from call to call, for whoever keeps norms: the hook of a model, a unit of FSDP2, compiled code.

A slot is a record: first the norms c, second words, the fingerprints of the A, B and s that they belong to, which kernels
compare on the device. There is one for each stream, and one for CUDA graphs, which read and write it in place. Of W only what
it was made from is compared, and here: where that is another, no slot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fdora._torch import capturing

givers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Address of words -> who may have c already, given(W, A, B, s), or None; knows which W that is, made_from(W), where c is
kept beside the words, room[1], and whether forget_norms is told of changes of W: then ``norms`` is not None."""
MOST = 8192  # calls of compiled code
_of_calls: dict[Any, Any] = {}
seen_for_graphs: set[int] = set()  # by keep_for_graphs of triton/tree_kept.py
_captured: dict[int, tuple[Any, list[StorageWeakRef]]] = {}  # by id: what CUDA graphs read and write, and their weights
_lock = Lock()  # a dict that grows while another thread looks for its oldest raises


class NormCache:
    """``graph`` is the slot of graphs, which a capture has to find. Its words are 0, and so match nothing."""

    def __init__(self, graph: Any):
        self.graph = graph
        self.device: torch.device = graph.c.device
        self.made_from: Any = None
        self.slots: dict[int, Any] = {}  # by stream

    @torch.inference_mode(False)  # else nobody outside of it could write there
    def new(self) -> Any:
        return type(self.graph)(*map(torch.zeros_like, self.graph))

    def forget(self) -> None:
        """Some W is another: all norms are computed again, also by the next replays of graphs."""
        self.slots.clear()
        forget_captured()

    def current(self, W: Sequence[Any], made_from: Any, update: Callable[[Any, Any], Any], in_place: bool = False) -> Any:
        """The slot after ``update(old, new)``, or what that returns; gone where it fails. ``in_place``: new is old; else c is
        new memory, which nobody writes again."""
        if made_from != self.made_from:
            if self.made_from is not None:  # what is new is clear: a capture would clear it again in every replay
                self.forget()
            self.made_from = made_from
        if capturing(self.device):
            hold(self, W)
            found = update(self.graph, self.graph) or self.graph
            for t, now in zip(self.graph, found, strict=True):
                if t is not now:
                    t.copy_(now)
            return found
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        old = self.slots.pop(stream, None) or self.new()
        new = old if in_place else old._replace(c=torch.empty_like(old.c))
        self.slots[stream] = found = update(old, new) or new
        return found


def hold(owner: Any, W: Sequence[Tensor]) -> None:
    """Keep it for the graph of this capture while any W lives: without them nothing is left to replay. If one is no parameter,
    a graph may have made it, and replays whoever holds it."""
    parameters = all([type(w) is torch.nn.Parameter for w in W])
    with _lock:
        for key, (_, weights) in list(_captured.items()):
            if weights and all([weight.expired() for weight in weights]):
                del _captured[key]
        _captured[id(owner)] = owner, [StorageWeakRef(w.untyped_storage()) for w in W] if parameters else []


def give_norm(words: Tensor, giver: Any) -> None:
    """Compiled code with these words asks this one first. Holds nothing."""
    givers[words.data_ptr()] = giver
    words.giver = ref(giver)  # type: ignore[attr-defined]  # found in a third of the time, where compiled code passes it on


def of_call(key: Any, device: torch.device, make: Callable[[], Any]) -> Any:
    """What compiled code keeps of the layers of a call, made where there is nothing; None in a capture: what is made then would
    be of the graph."""
    found = _of_calls.get(key)
    if found is None and not capturing(device):
        found = make()
        with _lock:
            if len(_of_calls) >= MOST:
                _of_calls.pop(next(iter(_of_calls)), None)
            _of_calls[key] = found
    return found


def forget_captured() -> None:
    """Graphs, of whatever model, compute all norms in their next replay."""
    with _lock:
        owners = [owner for owner, _ in _captured.values()]
    for owner in owners:
        if isinstance(owner, NormCache):
            owner.graph[1].zero_()


def forget_norms() -> None:
    """Some W is another: what compiled code and CUDA graphs keep is computed again."""
    forget_captured()
    with _lock:
        _of_calls.clear()
        seen_for_graphs.clear()
