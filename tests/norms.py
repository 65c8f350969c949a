"""Which norms calls compare and compute, seen where kernels run: below whoever keeps norms, and whatever holds them."""

import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass
class Launch:
    """The kernels of one plan that compares fingerprints, or that computes norms without one."""

    kind: str  # model, call, layer: with memory of its own for c, or "in place"; plain: nothing was compared
    changed: tuple[bool, ...]  # of each layer, whether it was computed
    c: torch.Tensor | None  # what is kept for the next call
    words: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    each: list[torch.Tensor] = field(default_factory=list)  # c of each layer
    plan: Any = None

    @property
    def computed(self):
        return sum(self.changed)


class Recorder:
    """``launches`` in order, of all threads. ``fail_after``: a plan for many layers ends after so many kernels."""

    def __init__(self, monkeypatch):
        from fdora import eager, triton  # noqa: F401
        from fdora.triton.runtime import walk

        self.launches, self.fail_after, self.run = [], None, walk.run
        for module in [m for name, m in sys.modules.items() if name.startswith("fdora.triton")]:
            if vars(module).get("run") is self.run:
                monkeypatch.setattr(module, "run", self.running)
        guarded = eager.tree.TreeLayers.guarded

        def in_torch(layers, W, A, B, old, new):
            before = old.words.clone()
            guarded(layers, W, A, B, old, new)
            each = [new.c[i : i + w.shape[0]] for i, w in zip(layers.at, W, strict=True)]
            self.note("model", old.c is new.c, before, new.words, new.c, each=each)

        monkeypatch.setattr(eager.tree.TreeLayers, "guarded", in_torch)

    def note(self, kind, in_place, before, words, c, **more):
        quiet = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # nobody may read a value there
        changed = () if quiet else tuple((before != words).view(-1, words.shape[-1]).any(1).tolist())
        self.launches.append(Launch(kind + " in place" * in_place, changed, c, words, **more))

    def running(self, plan, tensors, scalars=()):
        names = [result.name for result in plan.results]
        if plan.name == "norms of a model" and plan.steps:
            table, old_words, words, old, c = tensors
            if old_words is None:
                self.launches.append(Launch("plain", (True,) * table.shape[1], None))
                return self.run(plan, tensors, scalars)
            before = old_words.clone()
            if self.fail_after is not None:
                assert len(plan.steps) > self.fail_after
                self.run(replace(plan, steps=plan.steps[: self.fail_after], native=None), tensors, scalars)
                raise MemoryError
            done = self.run(plan, tensors, scalars)
            self.note("model", old is c, before, words, c, each=slices(table, c), plan=plan)
        elif plan.name == "norms kept of the layers of a call":
            table, words, counters, c = tensors
            before = words.clone()
            done = self.run(plan, tensors, scalars)
            self.note("call", True, before, words, c, counters=counters, each=slices(table, c), plan=plan)
        elif "fingerprint" in names:
            (i,) = [i for i, t in enumerate(tensors) if t is not None and t.dtype == torch.int64 and t.shape == (256,)]
            step = plan.steps[-1]
            keep = dict(zip(step.kernel.arg_names, (*step.args, *step.constexprs), strict=True)).get("KEEP", False)
            before = tensors[i].clone()
            done = self.run(plan, tensors, scalars)
            words, c = done[names.index("fingerprint")], tensors[i - 1] if keep else done[0]
            self.note("layer", keep, before, words, c, each=[c], plan=plan)
            self.launches[-1].words = tensors[i] if keep else words
        else:
            done = self.run(plan, tensors, scalars)
            if plan.name.startswith("dora_norm") and names == ["c"]:
                self.launches.append(Launch("plain", (True,), None))
        return done

    def of(self, kind):
        return [launch for launch in self.launches if launch.kind == kind]

    def counts(self):
        """How many of each kind since this was asked last."""
        found = {}
        for launch in self.launches:
            found[launch.kind] = found.get(launch.kind, 0) + 1
        self.launches.clear()
        return found

    def poison(self, factor, kind):
        """Whatever these launches left for the next ones, in place."""
        kept = {launch.c.data_ptr(): launch.c for launch in self.of(kind)}
        assert kept
        for c in kept.values():
            c.data.mul_(factor)


def slices(table, c):
    """By the rows of the table that kernels read: where the c of each layer begins, and how long it is."""
    from fdora.triton.tree_table import FIELDS

    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    at, rows, leaf = (table[FIELDS.index(name)].tolist() for name in ("c", "N", "leaf"))
    found = {i: c[begin : begin + n] for i, begin, n in zip(leaf, at, rows, strict=True)}
    return [found[i] for i in sorted(found)]


def capture(monkeypatch, now=True):
    """From here on everybody takes what runs for a part of a CUDA graph: where it is kept needs no CUDA to be seen."""
    from fdora._torch import capturing

    for name, module in list(sys.modules.items()):
        if name.startswith("fdora.") and vars(module).get("capturing") is capturing:
            monkeypatch.setattr(module, "capturing", lambda device: now)
