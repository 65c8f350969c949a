"""Adapters as a command line names them."""

from __future__ import annotations

from pathlib import Path

from fdora._check import fail
from fdora.explain_model import ADAPTER, load
from fdora.plan.setup import Adapter


def read_adapters(texts: list[str]) -> tuple[tuple[Adapter, ...], frozenset[str] | None]:
    """Of a command line: ``64``, ``4x64``, ``name=64``, or the folder of a PEFT adapter; with the targets of the folders.

    Raises:
      FdoraError: another form, or folders whose targets differ or are not among those that are planned.
    """
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
