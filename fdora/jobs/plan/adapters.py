"""Adapters as a command line names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fdora._check import fail
from fdora.explain_model import ADAPTER, is_file, load
from fdora.jobs.plan.setup import Adapter

# of PEFT's config: what trains more, less or something else than A, B and m of one rank on all layers of a name
OTHERS = (
    *("rank_pattern", "modules_to_save", "layers_to_transform", "exclude_modules", "target_parameters", "lora_bias"),
    *("trainable_token_indices", "layer_replication"),
)


def check_folder(config: dict[str, Any]) -> None:
    """Refuse what would be planned as if it were not there."""
    names, bias, kind = (config.get(key) for key in ("target_modules", "bias", "peft_type"))
    wrong = [key for key in OTHERS if config.get(key)]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        wrong.append("target_modules")
    if bias not in (None, "none"):
        wrong.append("bias")
    if kind not in (None, "LORA"):
        wrong.append("peft_type")
    if wrong:
        want = "folders of LoRA or DoRA adapters of one rank on a list of layers, with nothing else that is trained"
        raise fail("jobs.plan", "adapters", want, f"{wrong[0]} {config.get(wrong[0])!r}", "Pass a rank, and targets.")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise fail(
            "jobs.plan", "adapters", f"folders whose {ADAPTER} has a positive int `r`", repr(config.get("r")), "Check it."
        )


def read_adapters(texts: list[str]) -> tuple[tuple[Adapter, ...], frozenset[str] | None]:
    """Of a command line: ``64``, ``4x64``, ``name=64``, or the folder of a PEFT adapter; with the targets of the folders.

    Raises:
      FdoraError: another form, or folders whose targets differ, or that train what is not planned.
    """
    found: list[Adapter] = []
    targets: set[frozenset[str]] = set()
    for text in texts:
        if is_file(Path(text) / ADAPTER):
            config = load(Path(text) / ADAPTER, "jobs.plan", "adapters")
            check_folder(config)
            names = config["target_modules"]
            targets.add(frozenset(names))
            found.append(Adapter(Path(text).name, config["r"]))
            continue
        name, _, r = text.rpartition("=")
        count, _, r = r.rpartition("x")
        if not all(n.isdecimal() and len(n) < 7 for n in (r, count or "1")):
            raise fail(
                "jobs.plan", "adapters", "ranks (64, 4x64, name=64) or folders of PEFT adapters", repr(text), "Check the path."
            )
        many = int(count or 1)
        found += [Adapter(name or f"adapter {len(found) + i}", int(r)) for i in range(many)]
    if len(targets) > 1:
        raise fail("jobs.plan", "adapters", "folders with the same target_modules", f"{len(targets)} kinds", "Plan them apart.")
    return tuple(found), targets.pop() if targets else None
