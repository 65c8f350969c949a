"""What ``fdora tune`` measured on GPUs: one JSON file, which a process reads once, when it first chooses a tile.

The file is ~/.cache/fdora/tiles.json, below XDG_CACHE_HOME where that is set, or what FDORA_TILES names: nothing, or 0, is no
file. An entry is of a compute capability and a number of multiprocessors, and counts beside the torch, the Triton and the model
that it was measured with. Its factors, times taken over times modelled, are multiplied into the model's (tiles/product.py).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from fdora._check import FdoraError, fail

ABOUT = "written by fdora tune: time taken over time modelled, of each way, by direction and number of tokens"
FIRST = (65, 513, 2049)  # tokens: where a class begins; fewer have tiles of their own, which nothing tunes
TILES = Path(__file__).parent / "triton" / "tiles"


def class_of(forward: bool, tokens: int) -> str:
    """Empty where nothing is tuned."""
    first = max((n for n in FIRST if n <= tokens), default=0)
    return f"{'forward' if forward else 'backward'} from {first} tokens" if first else ""


def place() -> Path | None:
    named = os.environ.get("FDORA_TILES")
    if named is not None:
        return None if named in ("", "0") else Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fdora" / "tiles.json"


def key_of(capability: int, num_sms: int) -> str:
    return f"sm_{capability}, {num_sms} multiprocessors"


def key_at(device: Any) -> str:
    facts = torch.cuda.get_device_properties(device)
    return key_of(10 * facts.major + facts.minor, facts.multi_processor_count)


@lru_cache(1)
def made_with() -> dict[str, str]:
    """``model``: of the numbers and the formula that times are modelled by."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    model = b"".join([(TILES / name).read_bytes() for name in ("products.json", "pointers.json", "waves.py")])
    return {"torch": str(torch.__version__), "triton": triton, "model": f"{crc32(model):08x}"}


def load(path: Path) -> dict[str, Any]:
    """Entries by their GPUs; none where no file can be read.

    Raises:
      FdoraError: the file is broken.
    """
    try:
        entries: dict[str, Any] = json.loads(path.read_text())["gpus"]
        for entry in entries.values():
            numbers = [n for side in entry["factors"].values() for n in side.values()]
            if not entry["made_with"].keys() or not all(0 < n < inf for n in numbers):
                raise ValueError("a factor that is none")
    except OSError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        have = f"{path}, which is broken ({type(error).__name__}: {error})"
        raise fail("tune", "FDORA_TILES", "a file of fdora tune", have, "Delete it; fdora tune writes a new one.") from None
    return entries


def save(path: Path, key: str, entry: dict[str, Any]) -> None:
    """Beside the entries of other GPUs. Whole or not at all, whenever it is stopped."""
    text = json.dumps({"about": ABOUT, "gpus": load(path) | {key: entry}}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(text + "\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@lru_cache(1)
def entries() -> dict[str, Any]:
    """Of this process."""
    path = place()
    try:
        return load(path) if path else {}
    except FdoraError as error:
        warnings.warn(f"{error} Until then tiles are chosen without it.", RuntimeWarning, stacklevel=2)
        return {}


@lru_cache(16)
def factors_of(capability: int, num_sms: int) -> Mapping[str, Mapping[str, float]]:
    """By class, by way."""
    entry = entries().get(key_of(capability, num_sms))
    return entry["factors"] if entry and entry["made_with"] == made_with() else {}


def state(key: str) -> str:
    """For people: whether a GPU's tiles are tuned. Raises as ``load`` does."""
    path, why = place(), "says nothing of this GPU"
    entry = load(path).get(key) if path else None
    if entry and entry["made_with"] == made_with():
        if entry["factors"]:
            return f"tuned by {path}"
        why = "found nothing faster"
    elif entry:
        why = f"is of {', '.join(map(' '.join, entry['made_with'].items()))}: run fdora tune again"
    return f"as fdora has them; {path or 'FDORA_TILES'} {why}"
