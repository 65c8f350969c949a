"""What the training of many adapters is made of, as values; and a state as one file, ``<folder>/training.safetensors``.

The file is all that the training of all adapters goes on from, to the bit: the whole state, of whatever number of stages it was
gathered from. The names of the jobs are inside of it, so a name is any text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fdora._check import fail, is_number
from fdora.convert.files import make_folder, readable, writable, write_file
from fdora.jobs.schedule import Schedule, optimizer_steps
from fdora.jobs.schedule.order import Batch
from fdora.jobs.schedule.records import Microbatch

Params = Any
"""A dict: name -> pytree of tensors (G, ...), row a adapter a's. A bank for each layer, perhaps heads."""
Keep = Callable[[Params], Any] | None
"""What is computed of params once for each optimizer step; without gradients."""


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


def init_state(params: Params, jobs: Sequence[Job], keep: Keep = None) -> State:
    """The state to start with.

    Args:
      params: name -> pytree of floating tensors (G, ...), G the number of jobs; row a belongs to job a. Not copied.
      jobs: one for each adapter.
      keep: of the :class:`Model` or :class:`Stage` that will train them.

    Raises:
      FdoraError: a tensor has not one row for each job, or is not floating, two jobs share a name, or AdamW has no such number.
    """
    fn = "jobs.loop.init_state"
    check_names(fn, [job.name for job in jobs])
    for a, job in enumerate(jobs):
        check_optimizer(fn, f"jobs[{a}]", job)
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


def check_optimizer(fn: str, arg: str, job: Job) -> None:
    """The numbers of AdamW. What a function gives as the rate is its own affair."""
    pair = isinstance(job.betas, (tuple, list)) and len(job.betas) == 2
    fits = {
        "lr": ("a function, or a finite number of 0 or more", callable(job.lr) or within(job.lr)),
        "clip": ("None or a number above 0", job.clip is None or (within(job.clip) and job.clip > 0)),
        "betas": ("two numbers in [0, 1)", pair and all(within(beta, 1.0) for beta in job.betas)),
        "eps": ("a finite number of 0 or more", within(job.eps)),
        "weight_decay": ("a finite number of 0 or more", within(job.weight_decay)),
    }
    for field, (want, fit) in fits.items():
        if not fit:
            raise fail(fn, f"{arg}.{field}", want, repr(getattr(job, field)), "They are torch.optim.AdamW's numbers.")


def within(value: object, end: float = math.inf) -> bool:
    return is_number(value) and 0 <= value < end


def check_jobs(fn: str, jobs: Sequence[Job], state: State, which: str, remedy: str) -> list[str]:
    """Their names, of which there is one for each adapter."""
    names, count = [job.name for job in jobs], len(state.steps)
    if len(names) != count:
        raise fail(fn, "jobs", f"{count}, one for each adapter of the {which}", len(names), remedy)
    check_names(fn, names)
    return names


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
def kept_of(keep: Keep, params: Params) -> Any:
    return None if keep is None else keep(params)


FILE, ABOUT = "training.safetensors", "fdora"


def save(folder: str | Path, state: State, jobs: Sequence[Job], notes: Any = None) -> None:
    """Write each adapter's parameters, moments, gradients so far and counters. Needs safetensors.

    A kill at any moment leaves the state that was there, or this one. ``notes``, anything that JSON holds, is in the same file
    for :func:`read_notes`.

    Raises:
      FdoraError: the folder cannot be written, or there is not one job for each adapter. What was there is unchanged.
    """
    names = check_jobs("jobs.loop.save", jobs, state, "state", "Pass those of init_state: an adapter left out would be lost.")
    with writable(Path(folder)):
        make_folder(Path(folder))
    tensors = {f"{part}/{key}": t for part in TREES for key, t in flat(getattr(state, part)).items()}
    about = {"jobs": names, "steps": state.steps, "position": state.position, "notes": notes}
    write_file(Path(folder) / FILE, tensors, {ABOUT: json.dumps(about)})


def load(folder: str | Path, like: State, jobs: Sequence[Job], keep: Keep = None) -> State:
    """What :func:`save` wrote, bit for bit.

    Args:
      folder: that of ``save``.
      like: a state of the same parameters, from :func:`init_state`: says names, shapes, dtypes and devices.
      jobs: one for each adapter of ``like``, in the order of its rows. Their names say which rows of the file these are; the
        file may have more.
      keep: as for ``init_state``.

    Raises:
      FdoraError: the file is missing, damaged, or of other parameters or jobs; or there is not one job for each adapter.
    """
    fn = "jobs.loop.load"
    names = check_jobs(fn, jobs, like, "state given", "Make the state with init_state and the jobs to load.")
    path = Path(folder) / FILE
    tensors, about = _read(path)
    lacking = [name for name in names if name not in about["jobs"]]
    if lacking:
        have = f"none for {lacking} among {sorted(about['jobs'])}"
        raise fail(fn, "folder", f"with an adapter for each job ({path})", have, "Pass jobs with the names of save's.")
    trees = {part: flat(getattr(like, part)) for part in TREES}
    wanted = {f"{part}/{key}": (t.shape[1:], t.dtype) for part, tree in trees.items() for key, t in tree.items()}
    if wanted != {key: (t.shape[1:], t.dtype) for key, t in tensors.items()}:
        wrong = sorted(key for key in wanted.keys() | tensors.keys() if key not in wanted or key not in tensors)
        have = f"another set of tensors ({', '.join(wrong[:3])})" if wrong else "other shapes or dtypes"
        raise fail(fn, "folder", f"of states like the one given ({path})", have, "Make the state with the same params.")
    rows = list(map(about["jobs"].index, names))
    parts = {}
    for part, tree in trees.items():
        leaves = [tensors[f"{part}/{key}"][rows].to(t.device) for key, t in tree.items()]
        parts[part] = optree.tree_unflatten(optree.tree_structure(getattr(like, part)), leaves)
    steps = tuple(about["steps"][row] for row in rows)
    return State(**parts, kept=kept_of(keep, parts["params"]), steps=steps, position=about["position"])


def read_notes(folder: str | Path) -> Any:
    """The ``notes`` of :func:`save`; None where there are none, or no file.

    Raises:
      FdoraError: the file is damaged.
    """
    path = Path(folder) / FILE
    with readable("jobs.loop.read_notes", path):
        if not path.exists():
            return None
    return _read(path)[1].get("notes")


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with readable("jobs.loop.load", path), safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(ABOUT)
        if text is None:
            remedy = "PEFT's files hold what serves, not these."
            raise fail("jobs.loop.load", "folder", "what save wrote", f"no counters in {path}", remedy)
        tensors, about = {key: file.get_tensor(key) for key in file.keys()}, json.loads(text)  # noqa: SIM118
    try:
        rows = {len(about["jobs"]), len(about["steps"]), *(t.shape[0] for t in tensors.values())}
        damaged = len(rows) > 1 or not all(type(n) is int for n in (*about["steps"], about["position"]))
    except (IndexError, KeyError, TypeError):
        damaged = True
    if damaged:
        raise fail("jobs.loop.load", "folder", "what save wrote", f"damaged counters in {path}", "Load an older copy.")
    return tensors, about


def flat(tree: Params) -> dict[str, torch.Tensor]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {json.dumps(path): t for path, t in zip(paths, leaves, strict=True)}
