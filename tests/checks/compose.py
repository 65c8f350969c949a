"""What dora_compose and dora_delta promise."""

import torch

from fdora.functional import dora_compose, dora_delta
from tests import device
from tests.close import rel_l2


def inputs(lead=(4,), N=6, dtype=torch.float64, lora_dtype=None, spread=0.05):
    g = 1 + spread * torch.randn(N, dtype=torch.float64)
    base, lora, bias = torch.randn(*lead, N), 0.05 * torch.randn(*lead, N), torch.randn(N)
    wide = torch.promote_types(dtype, torch.float32)
    made = (base.to(dtype), lora.to(lora_dtype or dtype), g.to(wide), bias.to(dtype))
    return tuple(t.to(device.NAME) for t in made)


def truth(base, lora, g, s, bias=None):
    y = g.double() * (base.double() + s * lora.double())
    return y if bias is None else y + bias.double()


def rounds_once():
    """At g near 1 (std 0.0015) half-precision results sit at the rounding floor, whatever mix of dtypes comes in."""
    for dtype, lora_dtype in ((torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, None)):
        base, lora, g, bias = inputs((64,), 512, dtype, lora_dtype, spread=0.0015)
        limit = 1.7e-3 if dtype == torch.bfloat16 else 2.2e-4
        y, delta = dora_compose(base, lora, g, s=2.0, bias=bias), dora_delta(base, lora, g, s=2.0)
        assert y.dtype == delta.dtype == dtype
        assert rel_l2(y, truth(base, lora, g, 2.0, bias)) <= limit
        assert rel_l2(delta, truth(base, lora, g, 2.0) - base.double()) <= limit


CHECKS = [
    rounds_once,
]
