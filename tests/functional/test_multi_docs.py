"""docs/adapters.md keeps its word: its programs, one after the other."""

import re

import pytest

from tests.test_layers import ROOT

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters.md").read_text(), re.S)


def test_the_programs():
    pytest.importorskip("peft", reason="the last is PEFT's; `make test` installs it")
    space = {}
    for program in PROGRAMS:
        exec(compile(program, "docs/adapters.md", "exec"), space)
    assert len(PROGRAMS) == 4 and space["adapters"][0].m.grad.abs().sum() > 0
    assert space["y"].shape == (3, 10, 48)
    (bank,) = space["banks"].values()
    assert bank.adapters == ("law", "med") and bank.ranks == (8, 4) and bank.params.m.shape == (2, 48)
