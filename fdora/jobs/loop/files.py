"""A state as files: one folder for each adapter, ``<folder>/<name>/training.safetensors``.

Where PEFT saves an adapter of that name, too: its files hold what serves, this one all that training goes on from. A state that
was loaded trains on to the bit. It is the whole state, of whatever number of stages it was gathered from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch

from fdora._check import fail
from fdora.convert.files import readable, writable, write_file
from fdora.jobs.loop.records import TREES, Job, Params, State, kept_of

FILE = "training.safetensors"


def save(folder: str | Path, state: State, jobs: Sequence[Job]) -> None:
    """Write each adapter's parameters, moments, gradients so far and counters. Needs safetensors.

    Raises:
      FdoraError: the folder cannot be written, or there is not one job for each adapter. Each file is replaced whole or not
        at all.
    """
    if len(jobs) != len(state.steps):
        want = f"{len(state.steps)}, one for each adapter of the state"
        raise fail("jobs.loop.save", "jobs", want, len(jobs), "Pass those of init_state: an adapter left out would be lost.")
    for a, job in enumerate(jobs):
        where = Path(folder) / job.name
        with writable(where):
            where.mkdir(parents=True, exist_ok=True)
        tensors = {f"{part}/{key}": t[a] for part in TREES for key, t in flat(getattr(state, part)).items()}
        tensors["counters"] = torch.tensor([state.steps[a], state.position])
        write_file(where / FILE, tensors)


def load(folder: str | Path, like: State, jobs: Sequence[Job], keep: Callable[[Params], Any] | None = None) -> State:
    """What :func:`save` wrote, bit for bit.

    Args:
      folder: that of ``save``.
      like: a state of the same parameters, from :func:`init_state`: says names, shapes, dtypes and devices.
      jobs: in the order of the rows; their names are those of the files.
      keep: as for ``init_state``.

    Raises:
      FdoraError: a file is missing or of other parameters, or the files are not of one moment.
    """
    fn = "jobs.loop.load"
    from safetensors.torch import load_file

    trees = {part: flat(getattr(like, part)) for part in TREES}
    found, counters = [], []
    for job in jobs:
        path = Path(folder) / job.name / FILE
        with readable(fn, path):
            tensors = load_file(path)
        own = tensors.pop("counters", None)
        if own is None or own.shape != (2,):
            raise fail(fn, "folder", "what save wrote", f"no counters in {path}", "PEFT's files hold what serves, not these.")
        counters.append(own.tolist())
        wanted = {f"{part}/{key}": (t.shape[1:], t.dtype) for part, tree in trees.items() for key, t in tree.items()}
        if wanted != {key: (t.shape, t.dtype) for key, t in tensors.items()}:
            wrong = sorted(key for key in wanted.keys() | tensors.keys() if key not in wanted or key not in tensors)
            have = f"another set of tensors ({', '.join(wrong[:3])})" if wrong else "other shapes or dtypes"
            raise fail(fn, "folder", f"of states like the one given ({path})", have, "Make the state with the same params.")
        found.append(tensors)
    if len({position for _, position in counters}) > 1:
        raise fail(fn, "folder", "of one moment", f"positions {[p for _, p in counters]}", "Save all adapters together.")
    parts = {}
    for part, tree in trees.items():
        rows = [torch.stack([each[f"{part}/{key}"] for each in found]).to(t.device) for key, t in tree.items()]
        parts[part] = optree.tree_unflatten(optree.tree_structure(getattr(like, part)), rows)
    steps = tuple(n for n, _ in counters)
    return State(**parts, kept=kept_of(keep, parts["params"]), steps=steps, position=counters[0][1])


def flat(tree: Params) -> dict[str, torch.Tensor]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {json.dumps(path): t for path, t in zip(paths, leaves, strict=True)}
