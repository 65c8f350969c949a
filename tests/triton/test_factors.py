"""Gradients of both factors in one launch, against float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.factors import factor_gradients
from fdora.triton.linear import plan_backward
from tests import device
from tests.close import assert_within
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.test_compile import device as gpu
from tests.triton.written import BF16, alike, kernels, layer, results_of

pytestmark = needs_kernels

HALF = torch.float16  # the interpreter multiplies bf16 wrongly


@pytest.mark.parametrize(("M", "K", "N", "r"), [(70, 96, 136, 12), (5, 33, 64, 80), (130, 200, 96, 1)])
@pytest.mark.parametrize("dtypes", [(HALF, HALF), (torch.float32, HALF)], ids=str)
@pytest.mark.parametrize("by_g", [False, True])
def test_factor_gradients(M, K, N, r, dtypes, by_g):
    """Ragged in every axis, ranks of several slabs and of less than one, h as columns of a wider one; g behind the sum."""
    torch.manual_seed(0)
    x, dh, dz = (torch.randn(M, n, device=device.NAME).to(HALF) for n in (K, r, N))
    h = torch.randn(M, 2 * r + 3, device=device.NAME).to(HALF)[:, r : 2 * r]

    def write(plan, *likes):
        x, dh, dz, h = map(plan.matrix, likes[:4])
        g = tuple(map(plan.vector, likes[4:])) or (None, None)
        dA, dB = plan.result("dA", (r, K), dtypes[0]), plan.result("dB", (N, r), dtypes[1])
        factor_gradients(plan, x, dh, dA, dz, h, dB, g=g)

    m, c = torch.rand(2, N, device=device.NAME) + 0.5
    dA, dB = results_of(write, x, dh, dz, h, *((m, c) if by_g else ()))
    assert dA.dtype == dtypes[0] and dB.dtype == dtypes[1]
    for got, u, v, g in ((dA, dh, x, None), (dB, dz, h, (m / c)[:, None] if by_g else None)):
        # Tensor cores add up with fewer digits than float32 has: there cuBLAS with the same operands is the measure, and so that
        # it takes tensor cores for a rank of 1 as well, with zeros beside them.
        wide = [torch.nn.functional.pad(t, (0, -t.shape[1] % 64)) for t in (u, v)]
        on_gpu = torch.mm(wide[0].T, wide[1], out_dtype=torch.float32)[: u.shape[1], : v.shape[1]] if u.is_cuda else None
        naive, want = u.float().T @ v.float() if on_gpu is None else on_gpu, u.double().T @ v.double()
        naive, want = (naive, want) if g is None else (naive * g, want * g.double())
        assert_within(got, naive.to(got.dtype), want, "a factor")


@pytest.mark.parametrize(("tokens", "need_B", "launches"), [(512, True, 1), (512, False, 0), (8192, True, 0)])
def test_few_tokens_take_one_launch_for_both(tokens, need_B, launches):
    x, la = alike(tokens, 8192, dtype=BF16), layer(8192, 8192, 128, BF16, BF16)
    likes, needs = (x, alike(tokens, 128, dtype=BF16), x, x, *la), (True, need_B, True, False, False)
    assert kernels(plan_backward(likes, gpu(90), 0.0, "lora", (False,), True, needs))["factors_kernel"] == launches
