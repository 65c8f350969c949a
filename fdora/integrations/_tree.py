"""The norms of all layers of a model by one call, at the beginning of each of its forwards; each layer takes its slice.

A hook on the model calls the kernels, which compare the bits of all A, B and s with those that each norm belongs to and
compute what changed (fdora/triton/tree.py). The layers then ask for theirs. A slice is handed out only

- in the thread whose hook ran, between the hooks before and after the model's forward,
- for the very tensors that the table was made from, with their strides and version counters of then.

Otherwise a layer compares and computes its own norm (KeptNorm), as it does without hooks. Why that is right, case by case:

accumulation        Every forward of the model asks again. Where nothing changed the kernels say so and copy.
backward            A layer keeps its slice for backward. Each forward gets a new buffer, so no slice is ever written again.
checkpointing       Recomputation runs inside of backward, where autograd's engine numbers its tasks. The first layer that asks
                    in a new task computes for all, from what A and B are now; the others of the task take theirs. An optimizer
                    that steps inside of backward reaches a layer after its gradients are complete, so after its last
                    recomputation. Both kinds of checkpoint recompute within the task of the outer backward or one of their own.
selective           checkpointing counts operations, of which a slice has none: under a dispatch mode there are no slices.
a submodule alone   No hook ran: its layers look after themselves. So they do after a model's forward has ended or raised. (A
                    Ctrl-C inside of a forward skips the hook after it; the next forward ends what that one began.)
two models on one   base have a table each. W is not compared by its bits: merges, reloads and moves tell every KeptNorm of the
                    layer, and all others on its W (forget), which makes their models start over; so does a W with another
                    version or address, which what is merged need not have. What changes W behind both needs use_fdora
                    again, as ever.
8-bit codes         A layer is known by its codes, A and B, and the version of its scales. Compiled code, and codes that are no
                    leaf beside dense weights (fdora.quant.codes8.in_trees), compute their own.
CUDA graphs         What is captured reads and writes buffers of its own, in place, which live as long as the process. The table
                    must be there before: a forward before the capture makes it.
threads, streams    Each thread has its slices, each stream its norms and fingerprints; a lock keeps launches of one call
                    together. Replicas of DataParallel have other tensors, and look after themselves.
torch.compile       of the whole model traces the hook: one op computes all norms, and each layer's code reads its slice of the
                    result, in the same trace. Compiled layers whose model is not compiled, or that come after a graph break,
                    have an op that asks as an eager layer does, when it runs, also what FSDP2 gathers together (_table.py):
                    that of the call itself, or where others read c (kept_norms) one that gives back a copy. Not by guards on
                    what the hook left: recomputation, outside of the hook, would run other code than the forward did, and
                    checkpoint refuses that. In CUDA graphs without the hook that op compares and computes by itself.
others that watch   torch.func, torch.jit.trace and dispatch modes, to whom values of now must not be constants: no slices.
copies              of a model have a hook that does nothing, until use_fdora is called on them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fdora import _plain
from fdora._norm_cache import forget_norms
from fdora._torch import backward_task, capturing, dispatch_modes, trace, untraced, while_tracing
from fdora.integrations._shard import gathered_together
from fdora.integrations._shard_norms import ShardNorms
from fdora.integrations._table import Found, Run, Table, Unit, units_of

UNASKED, ALONE = -1, -2  # instead of a layer's place among the norms of a model
MOST_MOVES = 8  # forwards in a row whose tensors lay elsewhere: shards that come and go. Then layers look after themselves


class Local(threading.local):
    run: Run | None = None
    forward = -1  # else a number below, other for each forward


_models: weakref.WeakValueDictionary[str, ModelNorms] = weakref.WeakValueDictionary()
_names = map("model {}".format, count())


def kepts_of_models() -> list[Any]:
    """The KeptNorms of all models."""
    return [kept for each in _models.values() for kept in [ref() for ref in each.kepts] if kept is not None]


@while_tracing
def collect(name: str) -> bool:
    """Anew for each trace: what is traced is for the layers and tensors of now."""
    norms = _models[name]
    with norms.lock:
        forget_norms()
        norms.table = norms.collect()
        return norms.table is not None


class ModelNorms:
    """The table of one model, and whose turn it is. ``find`` lists those of some modules that can be served now."""

    def __init__(self, model: Callable[[], Any], find: Callable[[Iterable[Any]], Found]):
        self.model, self.find = model, find
        self.lock = threading.RLock()
        self.local = Local()
        self.table: Table | None = None
        self.kepts: list[weakref.ref[Any]] = []  # of all layers
        self.placed: list[weakref.ref[Any]] = []  # whose norms the table has
        self.units: dict[int, Unit] = {}  # by the id of a KeptNorm
        self.on_shards: ShardNorms | None = None  # where use_fdora was asked for it
        self.switched_off = self.used = self.looked = False
        self.changes = self.idle = 0
        self.traced: list[Tensor] | None = None  # in a trace of the whole model, between the hooks
        self.traced_by = ""  # that trace; what a graph break leaves here is for no other one, nor for another thread
        self.name = next(_names)
        _models[self.name] = self

    def watch(self) -> None:
        """Before a forward, while what is sharded lies in pieces: each layer looks at its own."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            kepts = [kept for kept in [ref() for ref in self.kepts] if kept is not None]
            groups = [] if self.looked else gathered_together(self.model())
            known = {id(module): shard for group in groups for module, shard in group}
            news = [kept.watch(known) for kept in kepts]
            if any(news) and self.looked:
                groups = gathered_together(self.model())
            if groups:
                self.units = units_of([[module for module, _ in group] for group in groups], kepts, self.find)
            self.looked = True

    def of_unit(self, kept: Any, W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor | None:
        """c of a layer whose unit FSDP2 has gathered."""
        unit, task = self.units.get(id(kept)), backward_task()
        moment = self.local.forward if task == -1 else task
        if unit is None or moment == -1 or dispatch_modes() or capturing(W.device) or torch.is_inference_mode_enabled():
            return None
        c: Tensor | None = untraced(unit.c_of, kept, W, A, B, s, moment)
        return c

    def compute(self, task: int) -> Run | None:
        with self.lock:
            if self.switched_off:
                return None
            self.idle = 0 if self.used else self.idle + 1
            self.used = False
            if self.idle > 2:  # nobody wants them: merged, unloaded, switched off
                self.table, self.switched_off, self.idle = None, True, 0
                return None
            table = self.table
            alive = None if table is None else table.alive()
            if alive is None:
                if self.changes >= MOST_MOVES or capturing(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
                    return None
                self.changes += 1
                table = self.table = self.collect()
                alive = None if table is None else table.alive()
            else:
                self.changes = 0
            return None if table is None or alive is None else table.run(*alive, task)

    def collect(self) -> Table | None:
        model = self.model()
        found = [] if model is None else self.find(model.modules())
        for ref in self.placed:
            left = ref()
            if left is not None:
                left.place = UNASKED
        self.placed = [weakref.ref(kept) for kept, *_ in found]
        for i, (kept, *_) in enumerate(found):
            kept.norms, kept.place = self, i
        return Table(found) if found else None

    def forget(self) -> None:
        with self.lock:
            forget_norms()
            for unit in self.units.values():
                unit.forget()
            if self.table is not None:
                self.table.forget()
            if self.on_shards is not None:
                self.on_shards.norms = None
            self.local = Local()  # nor do slices of this forward hold

    def restart(self) -> None:
        """Other layers, or the same elsewhere: the next forward collects them."""
        with self.lock:
            forget_norms()
            self.table, self.switched_off, self.idle, self.changes, self.looked = None, False, 0, 0, False
            if self.on_shards is not None:
                self.on_shards.forget()
            self.local = Local()  # a Run refers weakly to the weights, which torch.utils.swap_tensors refuses

    def trace(self) -> None:
        if collect(self.name) and self.table is not None:
            self.traced, self.traced_by = self.table.traced(), trace()

    def traced_c(self, kept: Any, W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor | None:
        """The slice of this layer, in the trace that made it."""
        if self.traced is None or self.traced_by != trace() or self.table is None:
            return None
        i, n, tensors = kept.place, self.table.count, self.table.tensors
        if i < 0 or self.table.s[i] != s or tensors[i]() is not W or tensors[i + n]() is not A or tensors[i + 2 * n]() is not B:
            return None
        return self.traced[i]

    def c_of(self, i: int, W: Tensor, A: Tensor, B: Tensor, s: float, compiled: bool) -> Tensor | None:
        """The slice of layer i; None where it has to look after itself."""
        run, task = self.local.run, backward_task()
        if run is None or run.task != task:
            self.switched_off = False
            if task == -1 or dispatch_modes() or (compiled and capturing(W.device)):
                return None
            run = self.compute(task)
            if run is None:
                return None
            self.local.run = run
        elif dispatch_modes():
            return None
        if compiled and run.captured != capturing(W.device):  # of another graph, whose replays this one's do not follow
            return None
        table = run.table
        if table.has(i, W, A, B, s, run) or (compiled and table.has_views(i, W, A, B, s, run.versions)):
            self.used = True
            return run.c[i]
        with self.lock:
            if self.table is table:
                self.table = None  # collected anew by the next forward
        return None

    def running(self, device: torch.device) -> Run | None:
        """The norms of the forward or the task of now, if compiled code may have slices of them; who takes one sets `used`."""
        run = self.local.run
        if run is None or self.on_shards is not None or run.task != backward_task() or dispatch_modes():
            return None
        return run if run.captured == capturing(device) else None

    def with_norms(self, x: Tensor, found: list[tuple[Any, ...]], codes: Sequence[Any]) -> tuple[Any, ...] | None:
        """x, and of each layer (its variant, s, W, A, B, m, bias) the operands, with its slice; None where one has to ask by
        itself. Under no dispatch mode. ``codes``: the QuantWeights, if each W is the codes of one."""
        run = self.local.run
        if run is None or run.task != backward_task() or self.on_shards is not None:
            return None
        table, places = run.table, [each[0].kept.place for each in found] if codes else []
        tensors = _plain.operands(x, found, self, table.tensors, table.s, run.versions, run.c)
        if not all([table.has_scales(i, W, run) for i, W in zip(places, codes, strict=True)]):
            return None
        self.used = self.used or tensors is not None
        return tensors
