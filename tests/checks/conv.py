"""What dora_conv1d, 2d and 3d promise."""

import functools

import torch
import torch.nn.functional as F

from fdora.functional import dora_conv1d, dora_conv2d, dora_conv3d
from tests import device, reference

C, OUT, R = 16, 24, 8
KERNEL, SPACE = (3, 2, 2), (7, 6, 5)


def layer(n=2, dtype=torch.float64, groups=1, reads_all=False):
    """x, W, A, B, m and bias of a convolution over n axes. ``reads_all``: A reads the channels of all groups."""
    k, (seen, rank) = KERNEL[:n], (C, R // groups) if reads_all else (C // groups, R)
    shapes = {"x": (2, C, *SPACE[:n]), "W": (OUT, C // groups, *k), "A": (R, seen, *k), "B": (OUT, rank, *[1] * n)}
    rand = torch.Generator().manual_seed(0)
    t = {name: torch.randn(shape, generator=rand, dtype=dtype) / shape[1] ** 0.5 for name, shape in shapes.items()}
    t |= {"m": torch.rand(OUT, generator=rand, dtype=dtype) + 1, "bias": torch.randn(OUT, generator=rand, dtype=dtype)}
    return {name: v.to(device.NAME) for name, v in t.items()}


def ours(t, **geometry):
    f = (dora_conv1d, dora_conv2d, dora_conv3d)[t["W"].dim() - 3]
    return f(**t, s=0.7, **geometry)


def in_full_float32(check):
    """cuDNN rounds float32 to tf32 unless told otherwise."""

    @functools.wraps(check)
    def run():
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            check()

    return run


@in_full_float32
def keeps_the_memory_format():
    """Channels last stay last, first stay first: what torch's convolution gives, gradients too; nothing else would be a copy."""
    for n, G in ((2, 1), (2, 2), (3, 1)):
        last = torch.channels_last if n == 2 else torch.channels_last_3d
        t, how = layer(n, torch.float32, groups=G), {"padding": 1, "groups": G}
        for form in (torch.contiguous_format, last):
            x, W = t["x"].to(memory_format=form).requires_grad_(), t["W"].to(memory_format=form)
            conv = F.conv2d if n == 2 else F.conv3d
            y, plain = ours(t | {"x": x, "W": W}, **how), conv(x, W, **how)
            assert y.stride() == plain.stride(), (n, G, form)
            want = reference.conv(*(t[name] for name in "xWABm"), 0.7, t["bias"], **how)
            torch.testing.assert_close(y, want.float(), rtol=1e-5, atol=1e-5)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert dx.stride() == torch.autograd.grad(plain, x, torch.ones_like(plain))[0].stride()


CHECKS = [
    keeps_the_memory_format,
]
