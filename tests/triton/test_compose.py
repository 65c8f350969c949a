"""The compose kernels against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import torch

from fdora.functional import dora_compose
from tests import device
from tests.triton.marks import INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels


def test_transforms():
    base, lora, g = (torch.randn(shape, device=device.NAME) for shape in ((6, 40), (6, 40), (40,)))

    def loss(base, lora, g):
        return dora_compose(base, lora, g, s=0.7, backend="triton").square().sum()

    def plain(base, lora, g):
        return (g * (base + 0.7 * lora)).square().sum()

    for f in (
        torch.func.grad,
        torch.func.vmap,
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1, 2)), in_dims=(0, 0, None)),
    ):
        dims = {"in_dims": (0, 0, None)} if f is torch.func.vmap else {}
        got, want = f(loss, **dims)(base, lora, g), f(plain, **dims)(base, lora, g)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_gpu
def test_past_two_to_the_31_elements():
    M, N = 70_000, 32_768
    base = torch.zeros((M, N), device=device.NAME, dtype=torch.bfloat16)
    base[-3:] = torch.randn(3, N, device=device.NAME)
    g = torch.rand(N, device=device.NAME)
    y = dora_compose(base, base, g, s=1.0)
    torch.testing.assert_close(y[-3:], (g * 2 * base[-3:].float()).bfloat16())
