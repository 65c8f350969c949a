"""docs/layers.md keeps its word."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()


def test_the_programs():
    """One table, two adapters; then one adapter, and the table stays tied."""
    space = {"__name__": "docs"}
    two, one = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(two, "docs/layers.md", "exec"), space)
    torch.testing.assert_close(space["x"], space["table"][space["ids"]], rtol=1e-5, atol=1e-5)  # B is 0: nothing has moved
    torch.testing.assert_close(space["logits"], space["x"] @ space["table"].T, rtol=1e-4, atol=1e-4)
    init = space["dora_init"]
    space["dora_init"] = lambda *args: init(*args)._replace(B=torch.randn(1000, 8), m=torch.rand(1000) + 1)  # one that has
    exec(compile(one, "docs/layers.md", "exec"), space)
    tied, x = space["tied"], space["x"]
    torch.testing.assert_close(x, tied[space["ids"]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(space["logits"], x @ tied.T, rtol=1e-4, atol=1e-4)
