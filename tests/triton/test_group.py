"""Layers that share their input, and the activation between them, on the Triton backend."""

import pytest
import torch

from fdora.functional import dora_norm
from tests import device
from tests.checks.mlp import ACTS
from tests.make import tensors
from tests.triton.marks import DTYPES, HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_the_activation(act, dtype):
    """One rounding of float64's result, forward and backward."""
    from fdora.eager import act as eager
    from fdora.functional.act import gated_act

    gate, up, da = (3 * torch.randn(37, 131, device=device.NAME).to(dtype) for _ in range(3))
    gate[0, :4] = torch.tensor([0.0, -300, 300, -1e-7])
    want = [eager.act_fwd(gate.double(), up.double(), act), *eager.act_bwd(da.double(), gate.double(), up.double(), act)]
    gate.requires_grad_(), up.requires_grad_()
    a = gated_act(gate, up, act, backend="triton")
    for v, ref in zip([a.detach(), *torch.autograd.grad(a, [gate, up], da)], want, strict=True):
        torch.testing.assert_close(v.double(), ref, rtol=max(4e-6, torch.finfo(dtype).eps), atol=4e-6)


@pytest.mark.parametrize("biased", [(True, False, False), (True, True, False), (False, False, True), (False,) * 3], ids=str)
def test_a_bound_mlp_keeps_what_one_call_keeps(biased):
    """Beside a bias the value before g comes in the place of the output of gate or up, so their number does not say which."""
    from fdora._records import Dropout, Operands, Options
    from fdora.triton.mlp import mlp_bound, mlp_fwd

    shapes, operands = ((40, 24, 8), (40, 24, 8), (24, 40, 8)), []
    layers = [tensors(N, K, r, (8,), HALF[0], torch.float32, seed=i) for i, (N, K, r) in enumerate(shapes)]
    for t, has in zip(layers, biased, strict=True):
        c = dora_norm(t["W"], t["A"], t["B"], s=t["s"], backend="eager")
        operands.append(Operands(*(t[n] for n in "WABm"), c, t["bias"] if has else None, None))
    x = layers[0]["x"]
    call = [Options(t["s"], "output") for t in layers], Dropout(0.0, "lora")
    flat = (x, *(t for la in operands for t in la))
    y, saved, _ = mlp_fwd(x, operands, *call, "silu")
    (bound_y,), *got = mlp_bound(flat, *call, "silu")(flat)
    assert torch.equal(bound_y, y)
    for want, have in zip(saved.apart(), got, strict=True):
        for a, b in zip(want, have, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b
