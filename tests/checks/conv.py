"""What dora_conv1d, 2d and 3d promise."""

import functools

import torch
import torch.nn.functional as F

import fdora.functional
from tests import device, reference

S = 0.7
C, OUT, R = 4, 6, 2
KERNEL, SPACE = (3, 2, 2), (7, 6, 5)


def call(n):
    return getattr(fdora.functional, f"dora_conv{n}d")


def layer(n=2, dtype=torch.float64, adapter=None, seed=0, spread=0.05, size=None, **geometry):
    """x, W, A, B, m, bias and what to call with: an adapter away from its start."""
    rand = torch.Generator().manual_seed(seed)
    geometry = {name: v[:n] if isinstance(v, tuple) else v for name, v in geometry.items()}
    G, seen, transposed = geometry.get("groups", 1), geometry.pop("seen", "group"), geometry.get("transposed", False)
    c, out, r = (C, OUT, R) if size is None else size
    k = KERNEL[:n]

    def draw(*shape, std=1.0):
        return torch.randn(*shape, generator=rand, dtype=torch.float64) * std

    std = (c // G * k[0]) ** -0.5
    W = draw(c, out // G, *k, std=std) if transposed else draw(out, c // G, *k, std=std)
    A = draw(c // G, r, *k, std=std) if transposed else draw(r, c if seen == "all" else c // G, *k, std=std)
    B = draw(out, r // G if seen == "all" else r, *[1] * n, std=0.1)
    adapter = dtype if adapter is None else adapter
    W, A, B = W.to(dtype), A.to(adapter), B.to(adapter)
    V = reference.kernel(W, A, B, S, G, transposed)
    V = V.unflatten(0, (G, -1)).transpose(1, 2).flatten(0, 1) if transposed else V
    m = V.flatten(1).norm(dim=1) * (1 + spread * draw(out))
    t = dict(x=draw(2, c, *SPACE[:n]).to(dtype), W=W, A=A, B=B, m=m.to(adapter), bias=draw(out).to(dtype))
    return {name: v.to(device.NAME) for name, v in t.items()}, geometry


def truth(t, geometry, bias=True, s=S, c=None):
    args = [t[n] for n in ("x", "W", "A", "B", "m")]
    return reference.conv(*args, s, t["bias"] if bias else None, c, **geometry)


def ours(t, geometry, bias=True, s=S, **extra):
    f = call(t["W"].dim() - 2)
    return f(*(t[n] for n in ("x", "W", "A", "B", "m")), s=s, bias=t["bias"] if bias else None, **geometry, **extra)


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
        t, how = layer(n, torch.float32, padding=1, groups=G, size=(16, 24, 8))
        for form in (torch.contiguous_format, last):
            x, W = t["x"].to(memory_format=form).requires_grad_(), t["W"].to(memory_format=form)
            conv = F.conv2d if n == 2 else F.conv3d
            y, plain = ours(t | {"x": x, "W": W}, how), conv(x, W, padding=1, groups=G)
            assert y.stride() == plain.stride(), (n, G, form)
            torch.testing.assert_close(y, truth(t, how).float(), rtol=1e-5, atol=1e-5)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert dx.stride() == torch.autograd.grad(plain, x, torch.ones_like(plain))[0].stride()


CHECKS = [
    keeps_the_memory_format,
]
