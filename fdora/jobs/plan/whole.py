"""Every layout of one training, and the best of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from fdora._check import check_positive, fail
from fdora.jobs.plan.layout import Layout, Request, ways
from fdora.jobs.plan.memory import Memory
from fdora.jobs.plan.model import Model
from fdora.jobs.plan.setup import Setup, check_setup
from fdora.jobs.plan.time import Card, card


class Plan(NamedTuple):
    """What `plan` found: ``layouts``, those that fit first and the fastest on top; ``best`` is that one, None if none fits."""

    model: Model
    setup: Setup
    card: Card
    gpus: int
    tokens: int
    layouts: tuple[Layout, ...]

    @property
    def best(self) -> Layout | None:
        return self.layouts[0] if self.layouts and self.layouts[0].fits else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Bytes and seconds."""
        best = None if self.best is None else 0
        layouts = [each._asdict() | {"memory": _memory(each.memory)} for each in self.layouts]
        model = self.model._asdict() | {"biases": sorted(self.model.biases)}
        setup = self.setup._asdict() | {"adapters": [a._asdict() for a in self.setup.adapters]}
        setup |= {"targets": sorted(self.setup.targets)}
        own = self.card._asdict() | {"profile": self.card.profile._asdict()}
        return {
            "model": model,
            "setup": setup,
            "gpu": own,
            "gpus": self.gpus,
            "tokens": self.tokens,
            "best": best,
            "layouts": layouts,
        }


def _memory(found: Memory) -> dict[str, Any]:
    return found._asdict() | {"resident": found.resident, "peak": found.peak}


def plan(model: Model, setup: Setup, *, gpu: str | Card = "h200", gpus: int = 1, tokens: int | None = None) -> Plan:
    """Every layout of this training on so many GPUs, the best first.

    Memory: none on a device.

    Args:
      model: what :func:`read_model` gives.
      setup: adapters, length of a sequence and so on; its ``fuse`` and ``checkpointing`` are tried both ways.
      gpu: a key of ``fdora.predict.GPUS``, or a card.
      tokens: of a microbatch, a multiple of ``setup.length``; one sequence by default.

    Raises:
      FdoraError: an argument is out of range, or unknown.

    References: peaks and rates are checked against bench/results/h200/peaks.json.
    """
    check_setup(setup)
    count = setup.length if tokens is None else tokens
    if type(count) is not int or count < 1 or count % setup.length:
        raise fail("jobs.plan", "tokens", f"a multiple of the length {setup.length}", repr(count), "Sequences are whole.")
    check_positive("jobs.plan", "gpus", gpus, "It is how many there are.")
    found = gpu if isinstance(gpu, Card) else card(gpu)
    return Plan(model, setup, found, gpus, count, tuple(ways(Request(model, setup, found, gpus, count))))
