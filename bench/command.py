"""What commands have in common: where they run, how often, for how long, and where the result goes."""

from __future__ import annotations

import argparse
from pathlib import Path


def command(
    doc: str, device: str | None = "cpu", runs: int | None = None, seconds: float | None = None
) -> argparse.ArgumentParser:
    """A parser of --json, --commit, and those of --device, --runs and --seconds that have a default here. ``device="cuda"``:
    nothing else is allowed. --help begins with the first paragraph of ``doc``."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    if device is not None:
        parser.add_argument("--device", default=device, choices=("cuda",) if device == "cuda" else None)
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="start nothing after this time")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    parser.add_argument("--commit", help="what is measured, recorded in the file")
    return parser
