"""The norms of some layers from call to call, for whoever keeps norms: the hook of a model, a unit of FSDP2, compiled code.

A slot is a record of norms c and of words, the fingerprints of the A, B and s that they belong to, which kernels compare on the
device. There is one slot for each stream, and one for CUDA graphs, which read and write it in place. Of W only what it was made
from is compared, and here: where that is another, no slot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fdora._torch import capturing

MOST = 8192  # calls of compiled code
_of_calls: dict[Any, Any] = {}
seen_for_graphs: set[int] = set()  # by keep_for_graphs of triton/tree_kept.py
_captured: dict[int, tuple[Any, list[StorageWeakRef]]] = {}  # by id: what CUDA graphs read and write, and their weights
_lock = Lock()  # a dict that grows while another thread looks for its oldest raises


class NormCache:
    """``empty`` makes a slot whose words are 0, and so match nothing."""

    def __init__(self, device: torch.device, empty: Callable[[], Any]):
        self.device, self.empty = device, empty
        self.made_from: Any = None
        self.slots: dict[int, Any] = {}  # by stream
        self.graph = self.new()  # a capture has to find it

    def new(self) -> Any:
        with torch.inference_mode(False):  # else nobody outside of it could write there
            return self.empty()

    def forget(self) -> None:
        """Some W is another: all norms are computed again, also by the next replays of graphs."""
        self.slots.clear()
        forget_captured()

    def current(self, W: Sequence[Any], made_from: Any, update: Callable[[Any, Any], Any], in_place: bool = False) -> Any:
        """The slot after ``update(old, new)``; gone where that fails. c is new memory, which nobody writes again, if not
        ``in_place``."""
        if made_from != self.made_from:
            if self.made_from is not None:  # what is new is clear: a capture would clear it again in every replay
                self.forget()
            self.made_from = made_from
        if capturing(self.device):
            hold(self, W)
            update(self.graph, self.graph)
            return self.graph
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        old = self.slots.pop(stream, None) or self.new()
        new = old if in_place else old._replace(c=torch.empty_like(old.c))
        update(old, new)
        self.slots[stream] = new
        return new


def hold(owner: Any, W: Sequence[Tensor]) -> None:
    """Keep it for the graph of this capture while any W lives: without them nothing is left to replay. If one is no parameter,
    a graph may have made it, and replays whoever holds it."""
    parameters = all([type(w) is torch.nn.Parameter for w in W])
    with _lock:
        for key, (_, weights) in list(_captured.items()):
            if weights and all([weight.expired() for weight in weights]):
                del _captured[key]
        _captured[id(owner)] = owner, [StorageWeakRef(w.untyped_storage()) for w in W] if parameters else []


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
            owner.graph.words.zero_()


def forget_norms() -> None:
    """Some W is another: what compiled code and CUDA graphs keep is computed again."""
    forget_captured()
    with _lock:
        _of_calls.clear()
        seen_for_graphs.clear()
