"""dora_compose and dora_delta: two reads and a write forward; with backward three more reads and two writes."""

import pytest
import torch

from bench.compose import OPS, SHAPES, composed, formula
from bench.truth import gradients, rel_l2
from bench.ways import differentiated


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("op", OPS[:2])
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_compose(measure, device, backend, op, case, mode):
    M, N = SHAPES[case] if device != "cpu" else (32 * (case + 1), 48)
    leaves, calls, _ = composed(op, M, N, device)
    dy = torch.randn(M, N, device=device).bfloat16()
    way = differentiated(lambda: calls["triton"](*leaves.values()), {n: t.requires_grad_() for n, t in leaves.items()}, dy)
    exact = gradients(lambda t: formula(op, **t), leaves, dy)
    for got, want in zip(way.both().values(), exact.values(), strict=True):
        assert rel_l2(got.detach(), want) <= 1.8e-3  # one rounding
    size = (3 if mode == "fwd" else 8) * dy.nbytes
    fn = way.forward if mode == "fwd" else way.both
    measure(fn, bytes=size, flops=4 * M * N, op=op, M=M, N=N, dtype=dy.dtype, backend=backend, mode=mode)
