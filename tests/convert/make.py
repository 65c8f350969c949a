"""Adapters that have moved, and the truth about them: dense, float64, nothing of fdora in it."""

import torch

from fdora.convert import Adapter
from tests import reference
from tests.make import tensors


def layer(N=24, K=20, r=3, seed=0, dtype=torch.float32, s=0.7, size=6.0, **more):
    """W and an adapter whose update is about a third of it."""
    t = tensors(N, K, r, seed=seed, dtype=dtype, adapter=torch.float32, s=s, **more)
    t["B"] *= size
    c = reference.norm(t["W"], t["A"], t["B"], s)
    rand = torch.Generator().manual_seed(100 + seed)
    m = (c * (1 + 0.05 * torch.randn(N, generator=rand, dtype=torch.float64).to(c.device))).to(t["m"].dtype)
    return t["W"], Adapter(t["A"], t["B"], m, s)


def columns(p, W):
    """The same factors with a magnitude for each input column."""
    c = reference.norm(W.T, p.B.T, p.A.T, p.s)
    return p._replace(m=(c * torch.linspace(0.9, 1.1, len(c), dtype=c.dtype)).to(p.A.dtype), norm_axis=0)


def merged(W, p):
    """W' in float64."""
    V = W.double().flatten(1) + p.s * p.B.double().flatten(1) @ p.A.double().flatten(1)
    if p.m is None:
        return V.view(W.shape)
    c = V.square().sum(p.norm_axis, keepdim=True).sqrt()
    g = p.m.double().view_as(c) / c.clamp_min(1e-12)
    return (g * V).view(W.shape)


def target(W, adapters, weights):
    """W + sum_i w_i (W'_i - W)."""
    return W.double() + sum(w * (merged(W, p) - W.double()) for p, w in zip(adapters, weights, strict=True))


def missed(W, got, want):
    """||got - want|| / ||want - W||."""
    return ((got.double() - want).norm() / (want - W.double()).norm()).item()
