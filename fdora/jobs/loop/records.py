"""What the training of many adapters is made of, as values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fdora._check import fail
from fdora.jobs.schedule import Schedule, optimizer_steps
from fdora.jobs.schedule.order import Batch
from fdora.jobs.schedule.records import Microbatch

Params = Any
"""A dict: name -> pytree of tensors (G, ...), row a adapter a's. A bank for each layer, perhaps heads."""


class Job(NamedTuple):
    """How one adapter is trained: AdamW with a rate and a clipping of its own."""

    name: str
    lr: float | Callable[[int], float]
    """A number, or a function of the optimizer steps taken, from 0."""
    clip: float | None = None
    """The largest norm of the gradient of all its parameters."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def rate(self, step: int) -> float:
        return float(self.lr(step) if callable(self.lr) else self.lr)


class Work(NamedTuple):
    """A microbatch for the training loop: its samples, their weights, and the optimizer steps that follow."""

    samples: Microbatch
    weights: tuple[float, ...]
    """Of each sample's loss: 1 / samples of its batch, in whichever microbatches they are."""
    due: tuple[Batch, ...]
    """(adapter, batch) whose optimizer steps once this microbatch is through."""


class State(NamedTuple):
    """Everything that training changes. A pytree; nothing in it is changed in place, unless it is donated."""

    params: Params
    kept: Any
    """What is computed of params once for each optimizer step, such as the norms; no part of a checkpoint."""
    grads: Params
    """Of each adapter's batch so far."""
    mean: Params
    square: Params
    steps: tuple[int, ...]
    """Of each adapter's optimizer."""
    position: int
    """Microbatches that are through."""


def works_of(schedule: Schedule | Sequence[Microbatch]) -> tuple[Work, ...]:
    """Each microbatch of a schedule with the weights of its samples and the optimizer steps that follow it."""
    found = schedule.microbatches if isinstance(schedule, Schedule) else tuple(schedule)
    sizes = Counter(sample[:2] for each in found for sample in each)
    due = optimizer_steps(found)
    return tuple(Work(each, tuple(1 / sizes[sample[:2]] for sample in each), now) for each, now in zip(found, due, strict=True))


def init_state(params: Params, jobs: Sequence[Job], keep: Callable[[Params], Any] | None = None) -> State:
    """The state to start with.

    Args:
      params: name -> pytree of floating tensors (G, ...), G the number of jobs; row a belongs to job a. Not copied.
      jobs: one for each adapter.
      keep: of the :class:`Model` or :class:`Stage` that will train them.

    Raises:
      FdoraError: a tensor has not one row for each job, or is not floating, or two jobs share a name.
    """
    fn = "jobs.loop.init_state"
    check_names(fn, [job.name for job in jobs])
    for path, t in zip(*optree.tree_flatten_with_path(params)[:2], strict=True):
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.dim() < 1 or t.shape[0] != len(jobs):
            have = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
            want = f"a floating tensor with {len(jobs)} rows, one for each job"
            raise fail(fn, f"params{''.join(f'[{key!r}]' for key in path)}", want, have, "Stack adapters with dora_stack.")
    params = optree.tree_map(lambda t: t.detach(), params)
    grads, mean, square = (optree.tree_map(torch.zeros_like, params) for _ in range(3))
    return State(params, kept_of(keep, params), grads, mean, square, (0,) * len(jobs), 0)


def check_names(fn: str, names: Sequence[str]) -> None:
    """Any text is a name that has 1 to 200 bytes in UTF-8 and no NUL: checkpoints bear it."""
    if not names or len(set(names)) < len(names):
        raise fail(fn, "jobs", "at least one Job, each with a name of its own", list(names), "Checkpoints bear the names.")
    for name in names:
        size = len(name.encode(errors="surrogatepass")) if isinstance(name, str) else 0
        if not 1 <= size <= 200 or "\0" in name or re.search("[\ud800-\udfff]", name):
            raise fail(
                fn, "jobs", "named by text of 1 to 200 bytes in UTF-8 without NUL", repr(name), "Give the Job another name."
            )


def select_state(state: State, names: Iterable[str]) -> State:
    """The part of a state that holds the parameters of these names: what a process of a pipeline trains. ``kept`` is None.

    Raises:
      FdoraError: a name is not among those of the state.
    """
    names = tuple(names)
    lacking = [name for name in names if name not in state.params]
    if lacking:
        raise fail("jobs.loop.select_state", "names", f"among {sorted(state.params)}", lacking, "They are the keys of params.")
    parts: dict[str, Any] = {part: {name: getattr(state, part)[name] for name in names} for part in TREES}
    return state._replace(**parts, kept=None)


def copied(state: State) -> State:
    """One that may be donated while this one is kept. Parameters are never written into."""
    parts: dict[str, Any] = {part: optree.tree_map(torch.clone, getattr(state, part)) for part in TREES if part != "params"}
    return state._replace(**parts)


TREES = ("params", "grads", "mean", "square")


@torch.no_grad()
def kept_of(keep: Callable[[Params], Any] | None, params: Params) -> Any:
    return None if keep is None else keep(params)
