"""How every command writes its result: whole or not at all, whenever it is stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path


def save(path: Path | None, result: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(beside, path)
