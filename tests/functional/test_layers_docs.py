"""docs/layers.md keeps its word."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_programs():
    """One table, two adapters; then one adapter, and the table stays tied."""
    space = {"__name__": "docs"}
    two, one, _ = PROGRAMS
    exec(compile(two, "docs/layers.md", "exec"), space)
    torch.testing.assert_close(space["x"], space["table"][space["ids"]], rtol=1e-5, atol=1e-5)  # B is 0: nothing has moved
    torch.testing.assert_close(space["logits"], space["x"] @ space["table"].T, rtol=1e-4, atol=1e-4)
    init = space["dora_init"]
    space["dora_init"] = lambda *args: init(*args)._replace(B=torch.randn(1000, 8), m=torch.rand(1000) + 1)  # one that has
    exec(compile(one, "docs/layers.md", "exec"), space)
    tied, x = space["tied"], space["x"]
    torch.testing.assert_close(x, tied[space["ids"]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(space["logits"], x @ tied.T, rtol=1e-4, atol=1e-4)


def test_the_experts():
    """B is 0: nothing has moved."""
    space = {"__name__": "docs"}
    exec(compile(PROGRAMS[2], "docs/layers.md", "exec"), space)
    x, want = space["x"], torch.zeros_like(space["x"])
    for t, (ids, gates) in enumerate(zip(space["ids"].tolist(), space["gates"], strict=True)):
        for e, weight in zip(ids, gates, strict=True):
            gate, up = (space["gate_up"][e] @ x[t]).chunk(2)
            want[t] += weight * (space["down"][e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(space["y"], want, rtol=1e-4, atol=1e-3)
    assert space["y"].requires_grad
