"""docs/adapters.md keeps its word: its programs, one after the other."""

import re

import torch

from tests.test_layers import ROOT

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters.md").read_text(), re.S)


def test_the_programs():
    space = {}
    for program in PROGRAMS:
        exec(compile(program, "docs/adapters.md", "exec"), space)
    x, W, A, B = space["x"], space["W"], space["adapters"][1].A, space["adapters"][1].B
    assert space["y"].shape == (30, 48) and space["adapters"][0].m.grad.abs().sum() > 0
    assert len(PROGRAMS) == 3 and not torch.equal(space["y"][:12], x[:12] @ W.T) and A.shape[0] == B.shape[1] == 2
