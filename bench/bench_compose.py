"""dora_compose and dora_delta: two reads and a write forward; with backward three more reads and two writes."""

import pytest
import torch

from bench.compose import SHAPES
from bench.truth import gradients, rel_l2
from bench.ways import S, differentiated
from fdora.functional import dora_compose, dora_delta


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("op", [dora_compose, dora_delta])
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_compose(measure, device, backend, op, case, mode):
    M, N = SHAPES[case] if device != "cpu" else (8 * (case + 1), 48)
    base, lora, dy = (torch.randn(M, N, device=device).bfloat16() for _ in range(3))
    g = 1 + 0.0015 * torch.randn(N, device=device)
    leaves = {"base": base.requires_grad_(), "lora": lora.requires_grad_(), "g": g.requires_grad_()}
    way = differentiated(lambda: op(*leaves.values(), s=S), leaves, dy)
    exact = gradients(lambda t: [(t["g"] - int(op is dora_delta)) * t["base"] + t["g"] * S * t["lora"]], leaves, [dy])
    for got, want in zip(way.both().values(), exact.values(), strict=True):
        assert rel_l2(got.detach(), want) <= 1.8e-3  # one rounding
    size = (3 if mode == "fwd" else 8) * base.nbytes
    fn = way.forward if mode == "fwd" else way.both
    measure(fn, bytes=size, flops=4 * M * N, op=op.__name__, M=M, N=N, dtype=base.dtype, backend=backend, mode=mode)
