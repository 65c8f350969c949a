"""What experts of codes promise: the numbers of the dense functions on the weight that the codes stand for."""

import torch

from fdora.functional import dora_experts, dora_norm
from fdora.quant import quantize
from tests import device
from tests.checks.experts import S, mixture, mlp, weights_of
from tests.close import rel_l2
from tests.make import grads

KINDS = ("nf4", "mxfp4", "nvfp4", "int8", "fp8")
E, N, K, R, T = 3, 32, 64, 4, 40
ENDS = [9, 9, 37]  # an expert without tokens, tokens of nobody
NAMES = ("x", "A", "B", "m", "bias")


def coded(W, kind):
    """The codes of a stack, what they stand for in the dtype of W, and in float32."""
    q = quantize(W.flatten(0, 1), kind).to(W.dtype)
    whole = tuple(W.shape[:2])
    return q, q.dequantize(W.dtype).unflatten(0, whole), q.dequantize(torch.float32).unflatten(0, whole)


def numbers(seed=0):
    """(T, 2) experts of each token; some have none."""
    return torch.randint(-1, E, (T, 2), generator=torch.Generator().manual_seed(seed)).to(device.NAME)


def a_layer(kind, dtype, backend, close):
    t = mixture(E, N, K, R, T, dtype, torch.float32, spread=0.02)
    q, dense, exact = coded(t["W"], kind)
    c, own = dora_norm(exact, t["A"], t["B"], s=S, backend="eager"), dora_norm(q, t["A"], t["B"], s=S, backend=backend)
    assert own.dtype == torch.float32 and rel_l2(own, c) <= close
    leaves, ids = {n: t[n].requires_grad_() for n in NAMES}, numbers()
    leaves["gates"] = weights_of(ids, torch.float32).requires_grad_()
    offsets = torch.tensor(ENDS, device=device.NAME)
    for where in ({"offsets": offsets}, {"ids": ids, "gates": leaves["gates"]}):
        y, want = (
            dora_experts(t["x"], W, *(t[n] for n in "ABm"), s=S, bias=t["bias"], norm=norm, backend=backend, **where)
            for W, norm in ((q, None), (dense, c))
        )
        assert y.dtype == dtype and rel_l2(y, want) <= close, (kind, rel_l2(y, want))
        dy, asked = torch.randn_like(y), {n: v for n, v in leaves.items() if n != "gates" or "gates" in where}
        got, wanted = grads(y, dy, **asked), grads(want, dy, **asked)
        for n in asked:
            assert rel_l2(got[n], wanted[n]) <= close, (kind, n, rel_l2(got[n], wanted[n]))


def an_mlp(kinds, dtype, backend, close):
    """Of both layers, or of one."""
    up, down = mixture(E, 2 * N, K, R, T, dtype, None, 0.02), mixture(E, K, N, R, T, dtype, None, 0.02)
    ids, x = numbers(), up["x"]
    gates = weights_of(ids, torch.float32)
    whole, parts = [], []
    for t, kind in zip((up, down), kinds, strict=True):
        q, dense, _ = coded(t["W"], kind) if kind else (t["W"], t["W"], None)
        parts.append(t | {"W": q})
        whole.append(t | {"W": dense})
    leaves = {"x": x.requires_grad_(), "gates": gates.requires_grad_()}
    leaves |= {f"{n}{i}": t[n].requires_grad_() for i, t in enumerate((up, down)) for n in ("A", "B", "m", "bias")}
    found = []
    for each in (parts, whole):
        y = mlp(x, *each, "silu", ids=ids, gates=gates, backend=backend)
        found.append([y, *grads(y, torch.ones_like(y), **leaves).values()])
    for n, a, b in zip(("y", *leaves), *found, strict=True):
        assert rel_l2(a, b) <= close, (kinds, n, rel_l2(a, b))
