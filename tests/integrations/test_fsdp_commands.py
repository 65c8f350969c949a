"""TRL's and torchtune's own commands under FSDP2, with and without fdora; the other frameworks' want environments of their own.

``python -m tests.acceptance.fsdp`` runs them all.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed; `make test` installs it")
from tests.acceptance import fsdp


@pytest.mark.parametrize("name", ["trl fsdp2", "torchtune fsdp2"])
def test_the_same_adapter(name, tmp_path):
    packages = Path(sys.prefix) / "torchtune" / "torchdata"
    if name.startswith("torchtune") and not packages.exists():
        pytest.skip(f"`make test` installs torchtune and torchdata into {packages.parent}; this environment was made otherwise")
    wrong, said = fsdp.run(name, tmp_path)
    assert not wrong, f"{wrong} ({said})"
