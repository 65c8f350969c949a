"""The compose kernels against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import torch

from fdora.functional import dora_compose
from tests import device
from tests.triton.marks import INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@needs_gpu
def test_past_two_to_the_31_elements():
    M, N = 70_000, 32_768
    base = torch.zeros((M, N), device=device.NAME, dtype=torch.bfloat16)
    base[-3:] = torch.randn(3, N, device=device.NAME)
    g = torch.rand(N, device=device.NAME)
    y = dora_compose(base, base, g, s=1.0)
    torch.testing.assert_close(y[-3:], (g * 2 * base[-3:].float()).bfloat16())


@needs_gpu
def test_past_two_to_the_31_elements_of_planes():
    from fdora.triton import compose

    L, N, P = 3, 64, 12_000_000
    base = torch.zeros(L, N, P, device=device.NAME, dtype=torch.bfloat16)
    base[-1, -1, -5:] = 2
    g = torch.full((N,), 3.0, device=device.NAME)
    y = compose.compose_fwd(base, base, g, None, 1.0, False)
    assert y[-1, -1, -5:].tolist() == [12.0] * 5 and y[-1, -1, :-5].abs().max() == 0
