"""The truth: naive float64 DoRA over the full (N, K) weight. Shares no code with fdora."""

import torch
from einops import einsum
from torch.nn.functional import linear


def norm(W, A, B, s):
    V = W.double() + s * einsum(B.double(), A.double(), "N r, r K -> N K")
    return einsum(V, V, "N K, N K -> N").sqrt()


def scale(m, c):
    return m.double() / torch.where(c.double() < 1e-12, 1e-12, c.double())


def dora(x, W, A, B, m, s, bias=None, c=None, dropped=None, mode="lora"):
    """y in float64; differentiable by autograd in every tensor. c is detached unless given; dropped is D(x)."""
    x, W, A, B = (t.double() for t in (x, W, A, B))
    g = scale(m, norm(W, A, B, s).detach() if c is None else c)
    xd = x if dropped is None else dropped(x)
    base = einsum(x, W, "... K, N K -> ... N")
    lora = s * einsum(xd, A, B, "... K, r K, N r -> ... N")
    y = base + (g - 1) * einsum(xd, W, "... K, N K -> ... N") + g * lora if mode == "peft" else g * (base + lora)
    return y if bias is None else y + bias.double()


def naive(x, W, A, B, m, s, bias=None):
    """What a framework would write in the dtype of x: the error that any implementation in that dtype may have."""
    A, B = A.to(x.dtype), B.to(x.dtype)
    c = torch.linalg.vector_norm(W + s * (B @ A), dim=1).detach()
    y = (m.to(x.dtype) / c) * (linear(x, W) + s * linear(linear(x, A), B))
    return y if bias is None else y + bias.to(x.dtype)
