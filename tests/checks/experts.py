"""What dora_experts promises."""

import torch

from fdora.functional import DoraLayer, dora_experts, dora_experts_mlp, dora_norm
from tests import device, reference
from tests.close import assert_exact
from tests.make import tensors

S = 0.7


def mixture(E=3, N=6, K=5, r=2, T=7, dtype=torch.float64, adapter=None, spread=0.05):
    each = [tensors(N, K, r, (T,), dtype, adapter, spread=spread, seed=e) for e in range(E)]
    t = {n: torch.stack([one[n] for one in each]) for n in ("W", "A", "B", "m", "bias")}
    return t | {"x": each[0]["x"]}


def ours(t, ends, bias=True, s=S, **extra):
    return dora_experts(
        *(t[n] for n in ("x", "W", "A", "B", "m")), s=s, offsets=ends, bias=t["bias"] if bias else None, **extra
    )


def truth(t, ends, bias=True, s=S, c=None):
    return reference.experts(*(t[n] for n in ("x", "W", "A", "B", "m")), s, ends, t["bias"] if bias else None, c)


def offsets_of_any_kind():
    t = mixture()
    want = ours(t, [2, 4, 7])
    for dtype in (torch.int64, torch.int32):
        assert torch.equal(ours(t, torch.tensor([2, 4, 7], dtype=dtype, device=device.NAME)), want)
    assert torch.equal(ours(t, (2, 4, 7)), want)
    one = {n: v[:1] if n != "x" else v for n, v in t.items()}
    assert_exact(ours(one, [7]), truth(one, [7]))
    none = t | {"x": t["x"][:0]}
    assert ours(none, [0, 0, 0]).shape == (0, 6)
    turned = t | {"W": t["W"].transpose(1, 2).contiguous().transpose(1, 2)}  # a model that keeps (E, K, N)
    assert_exact(ours(turned, [2, 4, 7]), want)


IDS = torch.tensor([[2, 0], [1, 2], [2, -1], [0, 2], [-1, -1], [0, 2], [2, 2]])  # expert 1 has one token


def weights_of(ids, dtype=torch.float64, seed=3):
    return torch.rand(*ids.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device.NAME)


def layers_of_mlps(dtype=torch.float64, adapter=None, E=3, K=5, F=4, N=6, r=2, T=7):
    """x, and the tensors of gate_up and down."""
    up, down = mixture(E, 2 * F, K, r, T, dtype, adapter), mixture(E, N, F, r, T, dtype, adapter)
    up["W"] *= 8  # some of gate and of up are cut off on either side
    c = torch.stack([reference.norm(*(up[n][e] for n in "WAB"), S) for e in range(E)])
    up["m"] = (c * (1 + 0.05 * torch.randn_like(c))).to(up["m"].dtype)
    return up["x"], up, down


def mlp(x, up, down, act, bias=True, **extra):
    layers = [DoraLayer(*(t[n] for n in "WABm"), S, t["bias"] if bias else None) for t in (up, down)]
    return dora_experts_mlp(x, *layers, act=act, **extra)


def norms_of_a_stack():
    t = mixture()
    want = torch.stack([reference.norm(*(t[n][e] for n in "WAB"), S) for e in range(3)])
    assert_exact(dora_norm(t["W"], t["A"], t["B"], s=S), want)


CHECKS = [offsets_of_any_kind, norms_of_a_stack]
