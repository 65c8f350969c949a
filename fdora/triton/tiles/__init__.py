"""What was measured for the choice of tiles: JSON files of this folder, each written by the command of bench that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def measured(name: str) -> dict[str, Any]:
    """One of the files."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found
