"""A state as one file, ``<folder>/training.safetensors``: all that the training of all adapters goes on from, to the bit.

It is the whole state, of whatever number of stages it was gathered from. The names of the jobs are inside of it, so a name is
any text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch

from fdora._check import fail
from fdora.convert.files import make_folder, readable, writable, write_file
from fdora.jobs.loop.records import TREES, Job, Params, State, check_names, kept_of

FILE, ABOUT = "training.safetensors", "fdora"


def save(folder: str | Path, state: State, jobs: Sequence[Job], notes: Any = None) -> None:
    """Write each adapter's parameters, moments, gradients so far and counters. Needs safetensors.

    A kill at any moment leaves the state that was there, or this one. ``notes``, anything that JSON holds, is in the same file
    for :func:`read_notes`.

    Raises:
      FdoraError: the folder cannot be written, or there is not one job for each adapter. What was there is unchanged.
    """
    fn, names = "jobs.loop.save", [job.name for job in jobs]
    if len(jobs) != len(state.steps):
        want = f"{len(state.steps)}, one for each adapter of the state"
        raise fail(fn, "jobs", want, len(jobs), "Pass those of init_state: an adapter left out would be lost.")
    check_names(fn, names)
    with writable(Path(folder)):
        make_folder(Path(folder))
    tensors = {f"{part}/{key}": t for part in TREES for key, t in flat(getattr(state, part)).items()}
    about = {"jobs": names, "steps": state.steps, "position": state.position, "notes": notes}
    write_file(Path(folder) / FILE, tensors, {ABOUT: json.dumps(about)})


def load(folder: str | Path, like: State, jobs: Sequence[Job], keep: Callable[[Params], Any] | None = None) -> State:
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
    if len(jobs) != len(like.steps):
        want = f"{len(like.steps)}, one for each adapter of the state given"
        raise fail(fn, "jobs", want, len(jobs), "Make the state with init_state and the jobs to load.")
    check_names(fn, [job.name for job in jobs])
    path = Path(folder) / FILE
    tensors, about = _read(path)
    lacking = [job.name for job in jobs if job.name not in about["jobs"]]
    if lacking:
        have = f"none for {lacking} among {sorted(about['jobs'])}"
        raise fail(fn, "folder", f"with an adapter for each job ({path})", have, "Pass jobs with the names of save's.")
    trees = {part: flat(getattr(like, part)) for part in TREES}
    wanted = {f"{part}/{key}": (t.shape[1:], t.dtype) for part, tree in trees.items() for key, t in tree.items()}
    if wanted != {key: (t.shape[1:], t.dtype) for key, t in tensors.items()}:
        wrong = sorted(key for key in wanted.keys() | tensors.keys() if key not in wanted or key not in tensors)
        have = f"another set of tensors ({', '.join(wrong[:3])})" if wrong else "other shapes or dtypes"
        raise fail(fn, "folder", f"of states like the one given ({path})", have, "Make the state with the same params.")
    rows = [about["jobs"].index(job.name) for job in jobs]
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
