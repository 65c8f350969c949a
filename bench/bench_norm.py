"""dora_norm: W read once, the product B A once. See bench/conftest.py for the command."""

import pytest
import torch

from bench.norm_forms import SHAPES
from bench.truth import norm_of
from bench.ways import S, away
from fdora.functional import dora_norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_norm(measure, device, backend, case, dtype):
    N, K, r = SHAPES[case] if device != "cpu" else (64 * (case + 1), 128, 8)
    W = torch.randn(N, K, device=device).mul_(K**-0.5).to(dtype)
    A, B, *_ = away(W, r, dtype)

    def fn():
        return dora_norm(W, A, B, s=S)

    torch.testing.assert_close(fn().double(), norm_of(W, A, B, S), rtol=1e-6, atol=0)
    size = W.nbytes + A.nbytes + B.nbytes + 4 * N
    measure(fn, bytes=size, flops=2 * N * K * r, op="norm", N=N, K=K, r=r, dtype=dtype, backend=backend, mode="fwd")
