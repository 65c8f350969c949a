"""Inputs: weights as large as real ones, adapters that have moved (B != 0), and rows that break naive code."""

import torch

from tests import device, reference


def tensors(N=6, K=5, r=2, lead=(4,), dtype=torch.float64, adapter=None, kind="plain", s=0.7, spread=0.05, seed=0):
    """x, W, A, B, m, bias and s. std of g - 1 is ``spread``."""
    rand = torch.Generator().manual_seed(seed)

    def draw(*shape, std=1.0):
        return torch.randn(*shape, generator=rand, dtype=torch.float64) * std

    x, W, bias = draw(*lead, K), draw(N, K, std=max(K, 1) ** -0.5), draw(N)
    A = draw(r, K, std=max(K, 1) ** -0.5)
    B = draw(N, r, std=0.05 * r**-0.5)  # the update is about 5 % of W
    if kind == "zero_rows":
        W[::2] = B[::2] = 0
    if kind == "cancelling":
        B[::2] *= 20
        W[::2] = -s * (B @ A)[::2] + draw(*W[::2].shape, std=1e-2 * K**-0.5)  # c is 1 % of ||W||
    adapter = dtype if adapter is None else adapter
    x, W = x.to(dtype), W.to(dtype)
    A, B = A.to(adapter), B.to(adapter)
    m = reference.norm(W, A, B, s) * (1 + spread * draw(N))
    if kind == "zero_rows":
        m[::2] = 1e-12  # g = m / eps is about 1
    if kind == "zero_m":
        m[::3] = 0
    if kind == "negative_m":
        m[::2] *= -1
    out = dict(x=x, W=W, A=A, B=B, m=m.to(adapter), bias=bias.to(dtype))
    return {name: t.to(device.NAME) for name, t in out.items()} | {"s": s}


def large():
    """W, A and B in bfloat16, W of more than 2^31 elements; only its last 300 rows, whose offsets need 64 bits, hold anything."""
    N, K = 70_000, 32_768
    W = torch.zeros((N, K), device=device.NAME, dtype=torch.bfloat16)
    W[-300:] = torch.randn(300, K, device=device.NAME)
    A, B = torch.randn(8, K, device=device.NAME).bfloat16() / 181, torch.randn(N, 8, device=device.NAME).bfloat16()
    return W, A, B


def grads(y, dy, **wanted):
    """Gradients by name; raises where one does not come."""
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))


def tracked(t, *names):
    """The same inputs with the named ones as leaves that require grad."""
    return t | {n: t[n].detach().clone().requires_grad_() for n in names}
