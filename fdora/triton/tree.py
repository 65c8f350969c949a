"""The norms of many layers in three or four launches, whatever their shapes, ranks, dtypes and strides: kernels/tree.py.

The host writes a table of the layers once, and again where a pointer, a shape, a stride or s is another. Layers whose tiles
run the same code, usually all, share a launch; 8-bit codes, which are decoded in registers, have one of their own. float32
factors are split into float16 terms inside the kernel: of three products each is exact to 2^-22 of |b| |a|, as good as
tf32x3, at half precision's speed and for any rank. What scales the columns of a tile, a launch of its own has looked for.

A norm depends on its layer alone: the same bits in another tree, with and without a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fdora import _facts
from fdora._norm_cache import NormCache, hold, of_call
from fdora._records import Norms
from fdora._torch import capturing
from fdora.triton.kernels.tree import fingerprints_kernel, norms_kernel, roots_kernel, tops_kernel
from fdora.triton.op import op
from fdora.triton.runtime import Builder, Like, Plan, device_of
from fdora.triton.runtime.cost import Cost
from fdora.triton.runtime.device import by_another_thread
from fdora.triton.runtime.private import raw_stream
from fdora.triton.runtime.walk import ready, run
from fdora.triton.tiles.configs import power_of_two
from fdora.triton.tree_table import CHUNK, FIELDS, Scales, Tensors, flops_of, launches_of, rows_of

WORDS = 16  # as in fdora/eager/tree.py
HASH, ROOTS = 2048, 256  # words and rows at a time
TOPS = 16  # programs of a layer, which take its tiles of columns in turns; where nothing changed they end at once
ALIGN = 32  # numbers: each c begins at 128 bytes, as in fdora/functional/_tree.py


class TreeLayers:
    """What the kernels must know of some layers, all on one device; holds none of their tensors.

    W, A and B are as public functions check them. ``at`` is where the c of each layer begins in ``size`` numbers.
    """

    def __init__(self, W: Tensors, A: Tensors, B: Tensors, s: Scales, at: Sequence[int]):
        ready()
        self.device = W[0].device
        rows, self.partials = rows_of(W, A, B, s, at, device_of(self.device).capability)
        self.launches = launches_of(rows)
        flops, moved = sum(map(flops_of, rows)), sum(t.nbytes for t in (*W, *A, *B))
        self.count, self.work = len(rows), Cost(flops16=float(flops), bytes=moved)
        table = torch.tensor([[row.fields[name] for row in rows] for name in FIELDS], dtype=torch.int64)
        self.host = table.pin_memory() if self.device.type == "cuda" else table
        self.tables: dict[int, Tensor] = {}  # by stream: nothing waits for a copy on another one
        self.plans: dict[tuple[bool, int], Plan] = {}

    def table(self, W: Tensors = ()) -> Tensor:
        if self.device.type != "cuda":
            return self.host
        if capturing(self.device):  # a copy would be of the graph, and filled by its replays alone
            found = next(iter(self.tables.values()), None)
            found = self.host.to(self.device, non_blocking=True) if found is None else found
            hold((self, found), W)
            return found
        stream = raw_stream(self.device.index)
        if stream not in self.tables:
            self.tables[stream] = self.host.to(self.device, non_blocking=True)
        return self.tables[stream]

    def norms(self, W: Tensors, A: Tensors, B: Tensors, c: Tensor) -> None:
        """Writes all norms into c. The pointers of W, A and B are those of before."""
        run(self._plan(False, c), (self.table(W), None, None, c, c))

    def guarded(self, W: Tensors, A: Tensors, B: Tensors, old: Norms, new: Norms) -> None:
        """Writes new, which may be old: norms of before where the bits of A, B and s are."""
        run(self._plan(True, new.c), (self.table(W), old.words, new.words, old.c, new.c))

    def _plan(self, guarded: bool, c: Tensor) -> Plan:
        found = self.plans.get((guarded, c.shape[0]))
        if found is None:
            device = device_of(self.device)
            made = _plan(device, self.launches, self.count, self.partials, c.shape[0], self.work, guarded)
            found = self.plans[guarded, c.shape[0]] = made
        return found


def _plan(device: Any, launches: list[tuple], layers: int, partials: int, size: int, work: Cost, guarded: bool) -> Plan:
    """Of the table (FIELDS, layers), the words of before and of now (layers, WORDS), and the norms of before and of now."""
    plan = Builder("norms of a model", device)
    plan.path = "one launch for the tiles of all layers"
    table = plan.matrix(Like((len(FIELDS), layers), (layers, 1), torch.int64, True))
    words = Like((layers, WORDS), (WORDS, 1), torch.int64, True) if guarded else None
    old_words, new_words = plan.matrix(words), plan.matrix(words)
    old, new = (plan.vector(Like((size,), (1,), torch.float32, True)) for _ in range(2))
    differs = plan.temp((layers * WORDS,), torch.int32) if guarded else None
    partial = plan.temp((partials,))
    pdl = guarded and device.supports_pdl
    if guarded:
        given = {"table": table, "old": old_words, "new": new_words, "differs": differs, "L": layers}
        given |= {"WORDS": WORDS, "BLOCK": HASH, "PDL": plan.pdl}
        plan.launch(fingerprints_kernel, (layers * WORDS,), given, num_warps=8, cost=Cost())
    of_all = {"table": table, "differs": differs, "partial": partial, "L": layers, "WORDS": WORDS}
    work = shared(work, launches)  # guarded, kernels see how much of it there is to do
    for first, count, items, of, config in launches:
        given = of_all | {"first": first, "OF": of}
        if of.SPLIT:
            plan.launch(tops_kernel, (count, TOPS), given, num_warps=4, pdl=pdl, cost=Cost())
        given |= {"count": count, "BLOCK_L": power_of_two(count)}
        grid = (min(items, config.PROGRAMS * device.num_sms),)
        plan.launch(norms_kernel, grid, given, config, pdl=pdl, cost=work)
    given = of_all | {"old": old, "new": new, "CHUNK": CHUNK, "BLOCK_N": ROOTS}
    plan.launch(roots_kernel, (layers, 4), given, pdl=pdl, cost=Cost())
    return plan.plan()


def shared(work: Cost, launches: Sequence[tuple]) -> Cost:
    """Of each launch."""
    share = 1 / max(1, len(launches))
    return Cost(flops16=share * work.flops16, bytes=share * work.bytes)


class Kept(NormCache):
    """The norms that compiled code keeps of the layers of one model. Nobody else holds these tensors."""

    words = WORDS

    def __init__(self, W: Tensors, A: Tensors, B: Tensors, s: Scales):
        *at, self.size = accumulate(map(room, W), initial=0)
        self.layers = TreeLayers(W, A, B, s, at)
        super().__init__(self.new())

    def new(self) -> Any:
        return by_another_thread(self.nothing, self.layers.device)

    @torch.inference_mode(False)
    def nothing(self) -> Any:
        device = self.layers.device
        self.layers.table()  # on this stream
        words = torch.zeros((self.layers.count, self.words), device=device, dtype=torch.int64)
        return Norms(torch.zeros(self.size, device=device, dtype=torch.float32), words)

    def now(self, W: Tensors, A: Tensors, B: Tensors) -> Tensor:
        """Of which nobody may write."""
        norms: Norms = self.current(W, made_from(W), partial(self.layers.guarded, W, A, B), True)
        return norms.c


def made_from(W: Tensors) -> list[int]:
    return [0 if w.is_inference() else w._version for w in W]


def room(W: Tensor) -> int:
    return W.shape[0] + -W.shape[0] % ALIGN


def norms_kept(W: Tensors, A: Tensors, B: Tensors, s: Scales) -> Tensors:
    """c of each layer, for a compiler that traces: one op, which gives back norms of before where nothing changed."""
    return parts_of(model_norms(W, A, B, s), W)


def parts_of(c: Tensor, W: Tensors) -> Tensors:
    """Each layer's, of all c one behind the other."""
    return c.split_with_sizes([n for w in W for n in (w.shape[0], room(w) - w.shape[0])])[::2]


def norms_of_model(W: Tensors, A: Tensors, B: Tensors, s: Scales) -> Tensor:
    """A copy: whoever asked may write there, as Inductor does where it has use for the memory."""
    return norms_of_now(W, A, B, s).clone()


def norms_of_now(W: Tensors, A: Tensors, B: Tensors, s: Scales) -> Tensor:
    """A function of its arguments, which remembers by their addresses, the bits of A, B and s, and the version of W.

    What stands there now counts, not what stood there when the graph began: a recomputation in backward asks again.
    """
    kept = kept_of(Kept, W, A, B, s)
    return all_anew(W, A, B, s) if kept is None else kept.now(W, A, B)


def all_anew(W: Tensors, A: Tensors, B: Tensors, s: Scales) -> Tensor:
    *at, size = accumulate(map(room, W), initial=0)
    c = torch.zeros(size, device=W[0].device, dtype=torch.float32)
    TreeLayers(W, A, B, s, at).norms(W, A, B, c)
    return c


def kept_of(kind: Any, W: Tensors, A: Tensors, B: Tensors, s: Scales) -> Any:
    ready()
    tensors = (*W, *A, *B)
    key = (kind, tuple(map(Tensor.data_ptr, tensors)), _facts.facts(tensors), tuple(s))
    return of_call(key, W[0].device, lambda: kind(W, A, B, s))


def _fake_model_norms(W, A, B, s):
    return torch.empty(sum(map(room, W)), device=W[0].device, dtype=torch.float32)


def unplanned(W: Tensors, *_: Any) -> tuple[Plan]:
    """Without flops: only the device knows what it computes."""
    return (Builder("norms of a model", device_of(W[0].device)).plan(),)


model_norms = op(
    "model_norms(Tensor[] W, Tensor[] A, Tensor[] B, float[] s) -> Tensor",
    norms_of_model,
    _fake_model_norms,
    unplanned,
    mapped=False,
)
