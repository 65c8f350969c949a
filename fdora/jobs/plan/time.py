"""Time of a training step on one GPU: what its kernels take one after the other, or what the host takes to start them.

    step = max( microbatches (forward + backward) + update,  microbatches x host )

The rates are measured (profiles/, written by ``bench.profile_gpu``), or where they are not the maker's, for which times are
floors; kernels and bytes are those of :mod:`fdora.jobs.plan.work`. An
update forms all norms again, for A and B are new, and moves each parameter with its gradient and states.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import fail
from fdora.jobs.plan.decoder import decoder
from fdora.jobs.plan.memory import elements
from fdora.jobs.plan.model import Model, Part
from fdora.jobs.plan.setup import OPTIMIZERS, WEIGHTS, Setup
from fdora.jobs.plan.work import Profile
from fdora.predict import GPUS

FOLDER = Path(__file__).parent / "profiles"


class Card(NamedTuple):
    """A GPU with its memory and rates, as the planner uses it."""

    name: str
    bytes: int  # of memory
    profile: Profile
    measured: bool  # or the maker's published rates, by which times are floors


class Time(NamedTuple):
    """The predicted seconds of a microbatch, and of the update that comes once in a step."""

    forward: float
    backward: float
    host: float
    update: float

    def step(self, microbatches: int) -> float:
        return max(microbatches * (self.forward + self.backward) + self.update, microbatches * self.host)


def card(gpu: str, file: str | Path | None = None) -> Card:
    """A GPU by its key in ``fdora.predict.GPUS``, or with a measured profile of one's own in ``file``.

    Raises:
      FdoraError: no such GPU, or no such file.
    """
    key = gpu.lower()
    if key not in GPUS:
        raise fail("jobs.plan", "gpu", f"one of {', '.join(GPUS)}", repr(gpu), "For another measure one: bench.profile_gpu.")
    rate = GPUS[key]
    bytes = int(rate.gib * 2**30)
    own = Path(file) if file else FOLDER / f"{key}.json"
    if file or own.exists():
        found = read(own)
        if found.get("gpu") != key:
            raise fail("jobs.plan", "profile", f"of a {key}", repr(found.get("gpu")), "Pass the file that was measured there.")
        return Card(rate.name, found.get("memory") or bytes, Profile(**found["profile"]), True)
    floors = Profile(rate.flops, rate.bytes, 0.0, rate.flops, rate.flops, rate.flops, rate.tf32, 0.0, 0.0)
    return Card(rate.name, bytes, floors, False)


@lru_cache(8)
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
        Profile(**found["profile"])
        return found
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise fail(
            "jobs.plan", "profile", "a file that bench.profile_gpu wrote", f"{type(error).__name__} for {path}", "Check it."
        ) from error


def times(model: Model, setup: Setup, tokens: int, profile: Profile, part: Part | None = None) -> Time:
    """The predicted time of a microbatch of so many tokens, and of an update."""
    part = Part(model.layers) if part is None else part
    forward = backward = host = 0.0
    for segment in decoder(model, setup, tokens, part).segments:
        for op in segment.ops:
            there, back = profile.seconds(op.work.forward), profile.seconds(op.work.backward)
            kernels = 0 if op.work.calls else len(op.work.forward) + len(op.work.backward)
            own = kernels * profile.host + op.work.calls * profile.layer
            forward += there
            backward += back + (there if segment.checkpointed else 0.0)
            host += own * (1.5 if segment.checkpointed else 1.0)
    frozen, _, adapters = elements(model, setup, part)
    stored = frozen * WEIGHTS[setup.weights][0]
    rate = profile.norm16 if setup.adapter_bytes == 2 else profile.norm32
    norms = len(setup.adapters) * 2 * frozen * setup.width / rate
    states = 3 + 2 * OPTIMIZERS[setup.optimizer]  # parameter and states read and written, its gradient read
    update = max(stored / profile.bytes, norms) + states * adapters * setup.adapter_bytes / profile.bytes
    return Time(forward, backward, host, update)
