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
