"""What dora_mlp promises."""

import torch
import torch.nn.functional as F

from fdora.functional import DoraLayer, dora_linear, dora_mlp, dora_norm
from tests import device, reference
from tests.checks.group import MODES, masked, named, packed
from tests.close import assert_exact, rel_l2
from tests.make import grads, tensors

ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}
SEEDS = (3, 4, 5)


def three(K=7, inner=9, N=6, lead=(2, 4), dtype=torch.float64, adapter=None, kind="plain", ranks=(3, 2, 4), spread=0.05):
    """Inputs of gate, up and down; each brings an x, of which gate's is the one."""
    shapes = ((inner, K), (inner, K), (N, inner))
    return [
        tensors(n, k, r, lead, dtype, adapter, kind, s, spread, seed=i)
        for i, ((n, k), r, s) in enumerate(zip(shapes, ranks, (0.7, 0.7, 1.3), strict=True))
    ]


def leaves_of(layers, names, x=True):
    shapes = [t["x"] for t in layers]
    layers, leaves = named(layers, names, x)
    assert shapes[0].shape == layers[0]["x"].shape
    return layers, leaves, layers[0]["x"]


def by_layers(layer, layers, x, act):
    """The MLP of three calls of ``layer(i, t, x)``."""
    gate, up = (layer(i, layers[i], x) for i in (0, 1))
    return layer(2, layers[2], ACTS[act](gate) * up)


def truth(layers, x, act, biased, mode="none"):
    def layer(i, t, x):
        dropped = None if mode == "none" else masked(SEEDS[i])
        return reference.dora(x, *(t[n] for n in "WABms"), t["bias"] if biased else None, None, dropped, mode)

    return by_layers(layer, layers, x.double(), act)


def calls(layers, x, act, biased, mode="none"):
    def layer(i, t, x):
        extra = {} if mode == "none" else {"seed": SEEDS[i]}
        return dora_linear(x, *(t[n] for n in "WABm"), s=t["s"], bias=t["bias"] if biased else None, **MODES[mode], **extra)

    return by_layers(layer, layers, x, act)


def naive(layers, x, act, biased):
    return by_layers(
        lambda i, t, x: reference.naive(x, *(t[n] for n in "WABms"), t["bias"] if biased else None), layers, x, act
    )


def kept_inners_say_the_same():
    """Where tokens and norms are mapped nothing is looked at: of gate and up inner is kept, from which the output follows."""
    for biased in (False, True):
        layers, leaves, x = leaves_of(three(), ("A", "B", "m", "bias") if biased else ("A", "B", "m"))
        want = truth(layers, x, "silu", biased)

        norms = [dora_norm(*(t[n].detach() for n in "WAB"), s=t["s"]).expand(2, -1) for t in layers]

        def call(x, *norms, layers=layers, biased=biased):
            return dora_mlp(x, *(packed(t, biased, norm=c) for t, c in zip(layers, norms, strict=True)))

        y = torch.vmap(call)(x, *norms)
        assert_exact(y, want)
        dy = torch.randn_like(want)
        for (n, d), ref in zip(grads(y, dy, **leaves).items(), grads(want, dy, **leaves).values(), strict=True):
            assert_exact(d, ref, f"d{n}")


def only_what_is_asked_for():
    """Any frozen part, and whole layers: the rest is the same bit for bit."""
    layers, leaves, x = leaves_of(three(), ("A", "B", "m", "bias"))
    whole, dy = None, torch.randn(2, 4, 6, dtype=torch.float64, device=device.NAME)
    for frozen in ((), ("x",), ("A0", "B1"), ("m0", "m1", "m2"), ("A", "B"), ("x", "0", "1"), ("2",), ("x", "m1", "bias")):
        for n, leaf in leaves.items():
            leaf.requires_grad_(n not in frozen and n.rstrip("012") not in frozen and n[-1] not in frozen)
        got = grads(dora_mlp(x, *map(packed, layers)), dy, **{n: v for n, v in leaves.items() if v.requires_grad})
        whole = whole or got
        for n, d in got.items():
            assert torch.equal(d, whole[n]), (frozen, n)


def dm_survives_the_two_traps():
    """m = 0 in rows of gate and down (a gate of 0 lets nothing through to up, nor an up of 0 to the gate), and biases of tens
    in bf16, where the gate's own output is no way back to inner."""
    for trap in ("zero_m", "bias"):
        layers = three(64, 48, 40, (128,), torch.bfloat16, torch.float32, trap if trap == "zero_m" else "plain", (8, 8, 8))
        if trap == "zero_m":
            layers[1]["m"] = tensors(48, 64, 8, (1,), torch.bfloat16, torch.float32, seed=1)["m"]
        for t in layers if trap == "bias" else ():
            t["bias"] = (t["bias"].float() + 30).bfloat16()
        layers, leaves, x = leaves_of(layers, ("m",))
        y, want = dora_mlp(x, *(packed(t, trap == "bias") for t in layers)), truth(layers, x, "silu", trap == "bias")
        dy = torch.randn_like(y)
        got, ref = grads(y, dy, **leaves), grads(want, dy.double(), **leaves)
        for n in ("m0", "m1", "m2"):
            for rows in (slice(None), slice(int(n == "m1"), None, 3)):
                error = rel_l2(got[n][rows], ref[n][rows])
                assert error <= 1.5e-2, (trap, n, rows, error)


def graphs_can_be_kept():
    """A second backward through the same graph: nothing kept was overwritten."""
    layers, leaves, x = leaves_of(three(), ("A", "B", "m", "bias"))
    loss = dora_mlp(x, *map(packed, layers)).square().sum()
    runs = [torch.autograd.grad(loss, list(leaves.values()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def extreme_gates_stay_finite():
    """exp(88) and beyond, in every activation."""
    t = three()
    big = DoraLayer(*(t[0][n] for n in "WABm"), 0.7, torch.tensor([-1e4, -100, 0, 100, 1e4, 88, -88, 1e-30, 5.0]).to(t[0]["x"]))
    for act in ACTS:
        x = t[0]["x"].detach().float().requires_grad_()
        members = [
            DoraLayer(*(v.float() if isinstance(v, torch.Tensor) else v for v in la))
            for la in (big, packed(t[1]), packed(t[2]))
        ]
        y = dora_mlp(x, *members, act=act)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y.isfinite().all() and dx.isfinite().all(), act


CHECKS = [
    kept_inners_say_the_same,
    only_what_is_asked_for,
    dm_survives_the_two_traps,
    graphs_can_be_kept,
    extreme_gates_stay_finite,
]
