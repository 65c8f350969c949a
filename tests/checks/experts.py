"""What dora_experts promises."""

import torch

from fdora.functional import DoraLayer, dora_experts, dora_experts_mlp, dora_norm
from tests import device, reference
from tests.close import assert_exact
from tests.make import grads, tensors

S = 0.7
ENDS = ([3, 3, 7], [0, 0, 7], [7, 7, 7], [1, 4, 5], [0, 0, 0])  # an expert without tokens; tokens without an expert


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
ACTS = ("silu", "gelu", "gelu_tanh", "gpt_oss")


def weights_of(ids, dtype=torch.float64, seed=3):
    return torch.rand(*ids.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device.NAME)


def of_each(t, bias=True):
    """What reference.routed asks for."""
    own = t["bias"] if bias else None
    return lambda x, e: reference.dora(x, *(t[n][e] for n in "WABm"), S, None if own is None else own[e])


def tokens_with_their_experts():
    """ids and gates, against a sum token by token; each expert by itself; one expert for each token."""
    t, ids = mixture(), IDS.to(device.NAME)
    names = ("x", "A", "B", "m", "bias")
    leaves = {n: t[n].requires_grad_() for n in names} | {"gates": weights_of(ids).requires_grad_()}
    row = of_each(t)
    for dtype in (torch.int64, torch.int32):
        y = ours(t, None, ids=ids.to(dtype), gates=leaves["gates"])
        want = reference.routed(ids, leaves["gates"], lambda i, e: row(t["x"][i], e))
        assert_exact(y, want, f"{dtype}")
        dy = torch.randn_like(y)
        for (n, a), b in zip(grads(y, dy, **leaves).items(), grads(want, dy, **leaves).values(), strict=True):
            assert_exact(a, b, f"d{n}")
    each = ours(t, None, ids=ids)
    assert each.shape == (7, 2, 6)
    assert_exact((each * leaves["gates"][..., None]).sum(1), y)
    for n, d in grads(each, torch.stack([dy, 2 * dy], 1), **{n: leaves[n] for n in names}).items():
        twice = reference.routed(
            ids, torch.ones_like(leaves["gates"]) * torch.tensor([1.0, 2.0]).to(ids.device), lambda i, e: row(t["x"][i], e)
        )
        assert_exact(d, grads(twice, dy, **{n: leaves[n]})[n], n)
    one = ours(t, None, ids=ids[:, 0], gates=leaves["gates"][:, 0])
    assert_exact(ours(t, None, ids=ids[:, 0]), each[:, 0])
    assert_exact(one, leaves["gates"][:, :1] * each[:, 0])
    nobody = torch.full_like(ids, -1)
    assert not ours(t, None, ids=nobody, gates=leaves["gates"]).any()


def layers_of_mlps(dtype=torch.float64, adapter=None, E=3, K=5, F=4, N=6, r=2, T=7, bias=True, spread=0.05):
    """x, and the tensors of gate_up and down."""
    up, down = mixture(E, 2 * F, K, r, T, dtype, adapter, spread), mixture(E, N, F, r, T, dtype, adapter, spread)
    up["W"] *= 8  # some of gate and of up are cut off on either side
    c = torch.stack([reference.norm(*(up[n][e] for n in "WAB"), S) for e in range(E)])
    up["m"] = (c * (1 + spread * torch.randn_like(c))).to(up["m"].dtype)
    return up["x"], up, down


def mlp(x, up, down, act, bias=True, **extra):
    layers = [DoraLayer(*(t[n] for n in "WABm"), S, t["bias"] if bias else None) for t in (up, down)]
    return dora_experts_mlp(x, *layers, act=act, **extra)


def true_mlp(x, up, down, act, ids, gates, bias=True):
    first, second = of_each(up, bias), of_each(down, bias)
    return reference.routed(ids, gates, lambda i, e: second(reference.gated(first(x[i], e), act), e))


def mlps_match_the_truth():
    for act, bias in zip(ACTS, (True, False, False, True), strict=True):
        x, up, down = layers_of_mlps()
        ids, ones = IDS.to(device.NAME), torch.ones(7, 1, dtype=torch.float64, device=device.NAME)
        leaves = {"x": x.requires_grad_(), "gates": weights_of(ids).requires_grad_()}
        own = ("A", "B", "m", *(("bias",) if bias else ()))
        leaves |= {f"{n}{i}": t[n].requires_grad_() for i, t in enumerate((up, down)) for n in own}
        ends = [2, 2, 6]
        sorted_ids = torch.tensor([0, 0, 2, 2, 2, 2, -1], device=device.NAME)
        cases = [(mlp(x, up, down, act, bias, ids=ids, gates=leaves["gates"]), ids, leaves["gates"], leaves)]
        rest = {n: v for n, v in leaves.items() if n != "gates"}
        cases.append((mlp(x, up, down, act, bias, offsets=ends), sorted_ids, ones, rest))
        for y, who, gates, trained in cases:
            want = true_mlp(x, up, down, act, who, gates, bias)
            assert_exact(y, want, act)
            dy = torch.randn_like(y)
            for (n, a), b in zip(grads(y, dy, **trained).items(), grads(want, dy, **trained).values(), strict=True):
                assert_exact(a, b, f"d{n} {act}")


def norms_of_a_stack():
    t = mixture()
    want = torch.stack([reference.norm(*(t[n][e] for n in "WAB"), S) for e in range(3)])
    assert_exact(dora_norm(t["W"], t["A"], t["B"], s=S), want)


CHECKS = [offsets_of_any_kind]
CHECKS += [tokens_with_their_experts, mlps_match_the_truth, norms_of_a_stack]
