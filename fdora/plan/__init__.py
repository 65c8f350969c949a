"""What training adapters on a model takes, before it runs: memory by component, tokens of a microbatch, time, a layout on GPUs.

    python -m fdora.plan --model config.json --adapters 64 --gpu h200 --gpus 2

Pure functions of shapes, from records to records; docs/plan.md explains them. Memory is that of transformers' decoders with
:func:`fdora.integrations.peft.use_fdora`, in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import fail
from fdora.plan.layout import Layout as Layout
from fdora.plan.layout import Request, ways
from fdora.plan.memory import Memory as Memory
from fdora.plan.memory import capacity as capacity
from fdora.plan.memory import memory as memory
from fdora.plan.model import Model as Model
from fdora.plan.model import read_model as read_model
from fdora.plan.setup import Adapter as Adapter
from fdora.plan.setup import Setup as Setup
from fdora.plan.setup import check_setup
from fdora.plan.time import Card as Card
from fdora.plan.time import Time as Time
from fdora.plan.time import card as card
from fdora.plan.time import times as times

__all__ = [
    "Adapter",
    "Card",
    "Layout",
    "Memory",
    "Model",
    "Plan",
    "Setup",
    "Time",
    "capacity",
    "card",
    "memory",
    "plan",
    "read_model",
    "times",
]


class Plan(NamedTuple):
    """``layouts``: those that fit first, the fastest first; ``best`` is the first of them, None where none fits."""

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
        raise fail("plan", "tokens", f"a multiple of the length {setup.length}", repr(count), "Sequences are whole.")
    if type(gpus) is not int or gpus < 1:
        raise fail("plan", "gpus", "a positive int", repr(gpus), "It is how many there are.")
    found = gpu if isinstance(gpu, Card) else card(gpu)
    return Plan(model, setup, found, gpus, count, tuple(ways(Request(model, setup, found, gpus, count))))


def read_adapters(texts: list[str]) -> tuple[tuple[Adapter, ...], frozenset[str] | None]:
    """Of a command line: ``64``, ``4x64``, ``name=64``, or the folder of a PEFT adapter; with the targets of the folders.

    Raises:
      FdoraError: another form, or folders whose targets differ or are not among those that are planned.
    """
    from fdora.explain_model import ADAPTER, load

    found: list[Adapter] = []
    targets: set[frozenset[str]] = set()
    for text in texts:
        if (Path(text) / ADAPTER).exists():
            config = load(Path(text) / ADAPTER)
            names = config.get("target_modules")
            if not isinstance(names, list) or config.get("rank_pattern"):
                have = "a pattern" if isinstance(names, list) else repr(names)
                raise fail(
                    "plan", "adapters", "folders whose target_modules are a list, without rank_pattern", have, "Pass a rank."
                )
            targets.add(frozenset(names))
            found.append(Adapter(Path(text).name, int(config["r"])))
            continue
        name, _, r = text.rpartition("=")
        count, _, r = r.rpartition("x")
        if not r.isdigit() or not (count or "1").isdigit():
            raise fail(
                "plan", "adapters", "ranks (64, 4x64, name=64) or folders of PEFT adapters", repr(text), "Check the path."
            )
        many = int(count or 1)
        found += [Adapter(name or f"adapter {len(found) + i}", int(r)) for i in range(many)]
    if len(targets) > 1:
        raise fail("plan", "adapters", "folders with the same target_modules", f"{len(targets)} kinds", "Plan them apart.")
    return tuple(found), targets.pop() if targets else None
