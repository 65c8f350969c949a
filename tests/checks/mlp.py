"""What dora_mlp promises."""

import torch
import torch.nn.functional as F

from fdora.functional import DoraLayer, dora_mlp, dora_norm
from tests import reference
from tests.close import assert_exact
from tests.make import grads, tensors, tracked

ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}


def three(dtype=torch.float64):
    """Inputs of gate, up and down on the x of gate."""
    sizes = ((9, 7, 3, 0.7), (9, 7, 2, 0.7), (6, 9, 4, 1.3))
    layers = [tensors(N, K, r, (2, 4), dtype, s=s, seed=i) for i, (N, K, r, s) in enumerate(sizes)]
    return [t | {"x": layers[0]["x"]} for t in layers]


def packed(t, biased=True, **extra):
    return DoraLayer(t["W"], t["A"], t["B"], t["m"], t["s"], t["bias"] if biased else None, **extra)


def kept_inners_say_the_same():
    """Where tokens and norms are mapped nothing is looked at: of gate and up inner is kept, from which the output follows."""
    for biased in (False, True):
        layers = [tracked(t, "A", "B", "m", *["bias"] * biased) for t in three()]
        x = layers[0]["x"].requires_grad_()
        leaves = {f"{n}{i}": t[n] for i, t in enumerate(layers) for n in ("A", "B", "m", *["bias"] * biased)} | {"x": x}
        gate, up = (reference.dora(x, *(t[n] for n in "WABms"), t["bias"] if biased else None) for t in layers[:2])
        want = reference.dora(F.silu(gate) * up, *(layers[2][n] for n in "WABms"), layers[2]["bias"] if biased else None)
        norms = [dora_norm(*(t[n].detach() for n in "WAB"), s=t["s"]).expand(2, -1) for t in layers]

        def call(x, *norms, layers=layers, biased=biased):
            return dora_mlp(x, *(packed(t, biased, norm=c) for t, c in zip(layers, norms, strict=True)))

        y = torch.vmap(call)(x, *norms)
        assert_exact(y, want)
        dy = torch.randn_like(want)
        for (n, d), ref in zip(grads(y, dy, **leaves).items(), grads(want, dy, **leaves).values(), strict=True):
            assert_exact(d, ref, f"d{n}")


def extreme_gates_stay_finite():
    """exp(88) and beyond, in every activation."""
    gate, up, down = three(torch.float32)
    gate["bias"] = torch.tensor([-1e4, -100, 0, 100, 1e4, 88, -88, 1e-30, 5.0]).to(gate["x"])
    for act in ACTS:
        x = gate["x"].detach().requires_grad_()
        y = dora_mlp(x, *map(packed, (gate, up, down)), act=act)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y.isfinite().all() and dx.isfinite().all(), act


CHECKS = [
    kept_inners_say_the_same,
    extreme_gates_stay_finite,
]
