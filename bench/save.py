"""How every command writes its result: whole or not at all, whenever it is stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path


def replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(text)
    os.replace(beside, path)


def save(path: Path | None, result: dict) -> None:
    if path:
        replace(path, json.dumps(result, indent=1) + "\n")
