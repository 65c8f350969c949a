"""What dora_experts promises."""

import itertools

import torch
from torch.autograd import gradcheck

from fdora.functional import dora_experts
from tests import device, reference
from tests.close import assert_exact, assert_within
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


def matches_the_truth():
    for ends, bias, s in itertools.product(ENDS, (True, False), (S, -2.0)):
        t = mixture()
        names = ("x", "A", "B", "m", *(("bias",) if bias else ()))
        leaves = {n: t[n].requires_grad_() for n in names}
        y, want = ours(t, ends, bias, s), truth(t, ends, bias, s)
        assert_exact(y, want, f"{ends}")
        if ends[-1] == 0:
            continue
        dy = torch.randn_like(y)
        for (n, a), b in zip(grads(y, dy, **leaves).items(), grads(want, dy, **leaves).values(), strict=True):
            assert_exact(a, b, f"d{n} {ends}")


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


def gradients_reach_a_given_norm():
    t = mixture()
    c = torch.stack([reference.norm(t["W"][e], t["A"][e], t["B"][e], S) for e in range(3)])
    assert_exact(ours(t, [2, 2, 6], norm=c), ours(t, [2, 2, 6]))
    args = [t[n].requires_grad_() for n in ("x", "A", "B", "m", "bias")] + [c.requires_grad_()]

    def f(x, A, B, m, bias, c):
        return dora_experts(x, t["W"], A, B, m, s=S, offsets=[2, 2, 6], bias=bias, norm=c)

    assert gradcheck(f, args)


def half_precision_is_within_budget():
    for dtype, mixed in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        t = mixture(3, 40, 48, 8, 64, dtype, torch.float32 if mixed else None, spread=0.0015)
        leaves = {n: t[n].requires_grad_() for n in ("x", "A", "B", "m", "bias")}
        low = t | {n: v.detach().to(dtype).requires_grad_() for n, v in leaves.items()}
        ends = [20, 20, 64]
        parts = zip(
            low["x"].split([20, 0, 44]), *(low[n].unbind() for n in ("W", "A", "B", "m")), low["bias"].unbind(), strict=True
        )
        naive = torch.cat([reference.naive(x, W, A, B, m, S, b) for x, W, A, B, m, b in parts])
        y, want = ours(t, ends), truth(t, ends)
        dy = torch.randn_like(y)
        got, exact = grads(y, dy, **leaves), grads(want, dy.double(), **leaves)
        rough = grads(naive, dy, **{n: low[n] for n in leaves})
        assert_within(y, naive, want, f"{dtype} {mixed}")
        for n, leaf in leaves.items():
            assert got[n].dtype == leaf.dtype
            assert_within(got[n], rough[n], exact[n], f"d{n} {dtype} {mixed}")


CHECKS = [matches_the_truth, offsets_of_any_kind, gradients_reach_a_given_norm, half_precision_is_within_budget]
