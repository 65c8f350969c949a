"""Grids whose second axis has no room for all rows: flat, and the same bits. Interpreted, or for real with --device cuda."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.functional import dora_compose, dora_linear
from fdora.triton import compose
from fdora.triton.runtime import device as of_device
from tests import device
from tests.checks.multi import case, dy_of, together, with_gradients
from tests.make import grads, tensors, tracked
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import launches

pytestmark = needs_kernels


def layer():
    """Sums over several strips of tokens."""
    t = tracked(tensors(300, 136, 8, (540,), HALF[0]), "x", "A", "B", "m")
    y = dora_linear(*(t[name] for name in "xWABm"), s=t["s"], backend="triton")
    return {"y": y.detach()} | grads(y, torch.ones_like(y), **{name: t[name] for name in "xABm"})


def many_adapters():
    t = case((60, 0, 90), 12, 300, 48, (20, 3, 16), (0.7, -1.5, 2.0), HALF[0], None, bias=True, route="offsets", spread=0.02)
    return with_gradients(lambda t: together(t, ranks=None, backend="triton"), t, dy_of(t))


def rows():
    rand = torch.Generator().manual_seed(0)
    base, lora, g = (
        torch.randn(*shape, generator=rand).to(device.NAME).requires_grad_() for shape in ((300, 600), (300, 600), (600,))
    )
    y = dora_compose(base, lora, g, s=0.7, backend="triton")
    return {"y": y.detach()} | grads(y, torch.ones_like(y), base=base, lora=lora, g=g)


def planes():
    rand = torch.Generator().manual_seed(0)
    shapes = ((2, 70, 4200), (2, 70, 4200), (2, 70, 4200), (70,), (70,))
    base, lora, dy, g, bias = (torch.rand(shape, generator=rand).to(device.NAME) for shape in shapes)
    found = [
        compose.compose_fwd(base, lora, g, bias, 0.7, False),
        *compose.compose_bwd(dy, base, lora, g, 0.7, False, (True,) * 4),
    ]
    return dict(zip(("y", "base", "lora", "g", "bias"), found, strict=True))


CASES = {
    layer: {"scale_kernel"},
    many_adapters: {"multi_h_kernel", "multi_scale_kernel"},
    rows: {"compose_bwd_kernel"},
    planes: {"planes_fwd_kernel", "planes_bwd_kernel"},
}


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_a_flat_grid_moves_no_bit(call, monkeypatch, chosen_anew):
    def grids():
        steps = [step for plan in chosen_anew.values() for step in launches(plan) if step.kernel.fn.__name__ in CASES[call]]
        return {step.kernel.fn.__name__: len(step.grid) for step in steps}

    before = call()
    assert grids() == dict.fromkeys(CASES[call], 2)
    monkeypatch.setattr(of_device, "MOST_ROWS", 0)
    chosen_anew.clear()
    after = call()
    assert grids() == dict.fromkeys(CASES[call], 1)
    assert before.keys() == after.keys()
    for name, t in after.items():
        assert torch.equal(t, before[name]), name
