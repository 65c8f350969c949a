"""dora_compose and dora_delta: two reads and a write forward; with backward three more reads and two writes."""

import pytest
import torch

from bench.compose import SHAPES, S
from fdora.functional import dora_compose, dora_delta


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("op", [dora_compose, dora_delta])
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_compose(measure, device, backend, op, case, mode):
    M, N = SHAPES[case] if device != "cpu" else (8 * (case + 1), 48)
    base, lora, dy = (torch.randn(M, N, device=device).bfloat16() for _ in range(3))
    g = 1 + 0.0015 * torch.randn(N, device=device)
    leaves = [t.requires_grad_() for t in (base, lora, g)]

    def forward():
        return op(*leaves, s=S, backend=backend)

    def both():
        return torch.autograd.grad(forward(), leaves, dy)

    b, u, w = (t.detach().double().requires_grad_() for t in leaves)
    truth = (w - int(op is dora_delta)) * b + w * S * u
    results = [forward().detach(), *both()]
    exact = [truth.detach(), *torch.autograd.grad(truth, (b, u, w), dy.double())]
    for got, want in zip(results, exact, strict=True):
        assert ((got.double() - want).norm() / want.norm()).item() <= 1.8e-3  # one rounding
    no_grad = torch.no_grad()(forward)
    size = (3 if mode == "fwd" else 8) * base.nbytes
    fn = no_grad if mode == "fwd" else both
    measure(fn, bytes=size, flops=4 * M * N, op=op.__name__, M=M, N=N, dtype=base.dtype, backend=backend, mode=mode)
