"""A pytest plugin for PEFT's own tests: every DoRA layer they make runs through fdora, and each worker writes what ran."""

import json
import os
from collections import Counter
from pathlib import Path

from fdora.integrations import peft as shim
from fdora.integrations._peft.dora import Dora

TOTAL: Counter[str] = Counter()
_count = Dora.count


def count(self, path):
    TOTAL[path] += 1
    _count(self, path)


Dora.count = count
shim.enable()


def pytest_sessionfinish(session):
    folder = Path(os.environ["FDORA_COUNTS"])
    (folder / f"{os.getpid()}.json").write_text(json.dumps(TOTAL))
