"""docs/layers.md keeps its word."""

import torch

from tests.snippets import programs, ran

PAGE = "docs/layers.md"
PROGRAMS = programs(PAGE)


def test_the_programs():
    """One table, two adapters; then one adapter, and the table stays tied."""
    two, one, _ = PROGRAMS
    space = ran(two, PAGE)
    torch.testing.assert_close(space["x"], space["table"][space["ids"]], rtol=1e-5, atol=1e-5)  # B is 0: nothing has moved
    torch.testing.assert_close(space["logits"], space["x"] @ space["table"].T, rtol=1e-4, atol=1e-4)
    init = space["dora_init"]
    space["dora_init"] = lambda *args: init(*args)._replace(B=torch.randn(1000, 8), m=torch.rand(1000) + 1)  # one that has
    ran(one, PAGE, space)
    tied, x = space["tied"], space["x"]
    torch.testing.assert_close(x, tied[space["ids"]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(space["logits"], x @ tied.T, rtol=1e-4, atol=1e-4)


def test_the_experts():
    """B is 0: nothing has moved."""
    space = ran(PROGRAMS[2], PAGE)
    x, want = space["x"], torch.zeros_like(space["x"])
    for t, (ids, gates) in enumerate(zip(space["ids"].tolist(), space["gates"], strict=True)):
        for e, weight in zip(ids, gates, strict=True):
            gate, up = (space["gate_up"][e] @ x[t]).chunk(2)
            want[t] += weight * (space["down"][e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(space["y"], want, rtol=1e-4, atol=1e-3)
    assert space["y"].requires_grad
