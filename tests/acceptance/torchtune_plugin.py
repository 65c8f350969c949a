"""A pytest plugin for tests of torchtune: every DoRALinear they make runs through fdora, and at the end it writes what ran."""

import json
import os
from collections import Counter
from pathlib import Path

from torchtune.modules.peft import DoRALinear

from fdora.integrations import torchtune as shim

TOTAL: Counter[str] = Counter()
_count, _init = shim._Run.count, DoRALinear.__init__


def count(self, path):
    TOTAL[path] += 1
    _count(self, path)


def init(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    shim.use_fdora(self)
    self.weight.requires_grad_(
        False
    )  # as in every model whose adapters are trained; torchtune's tests of the layer leave it on


shim._Run.count = count
DoRALinear.__init__ = init


def pytest_sessionfinish(session):
    Path(os.environ["FDORA_COUNTS"]).write_text(json.dumps(TOTAL))
