"""What dora_linear_group promises."""

import torch

from fdora.eager.dropout import drop
from fdora.functional import DoraLayer, dora_linear, dora_linear_group
from tests import device, reference
from tests.close import assert_exact, rel_l2
from tests.make import grads, tensors, tracked

P = 0.4
SIZES = ((9, 3, 0.7), (6, 1, -1.5), (12, 4, 2.0))  # N, r and s of each layer
MODES = {"none": {}, "lora": dict(dropout_p=P, dropout_mode="lora"), "peft": dict(dropout_p=P, dropout_mode="peft")}


def many(K=7, lead=(2, 4), dtype=torch.float64, adapter=None, kind="plain", sizes=SIZES, spread=0.05):
    """Inputs of some layers, all with the x of the first."""
    layers = [tensors(N, K, r, lead, dtype, adapter, kind, s, spread, seed=i) for i, (N, r, s) in enumerate(sizes)]
    return [t | {"x": layers[0]["x"]} for t in layers]


def named(layers, names, x=True):
    """Fresh leaves: the layers with them, and all of them by name."""
    shared = {"x": layers[0]["x"].detach().clone().requires_grad_(x)}
    layers = [tracked(t, *names) | shared for t in layers]
    leaves = {f"{n}{i}": t[n] for i, t in enumerate(layers) for n in names}
    return layers, (shared if x else {}) | leaves


def packed(t, biased=True, **extra):
    return DoraLayer(t["W"], t["A"], t["B"], t["m"], t["s"], t["bias"] if biased else None, **extra)


def one(t, biased, mode="none", seed=None):
    """The layer alone."""
    args = (t[n] for n in ("x", "W", "A", "B", "m"))
    return dora_linear(*args, s=t["s"], bias=t["bias"] if biased else None, seed=seed, **MODES[mode])


def masked(seed):
    return lambda x: drop(x.reshape(-1, x.shape[-1]), torch.tensor(seed, device=x.device), P).reshape(x.shape)


def truth(t, biased, mode="none", seed=None):
    dropped = None if mode == "none" else masked(seed)
    return reference.dora(*(t[n] for n in "xWABms"), t["bias"] if biased else None, None, dropped, mode)


def joined(ys):
    return torch.cat([y.reshape(-1) for y in ys])


def only_what_is_asked_for():
    """Any frozen part, x too, and outputs nobody uses: the rest is the same bit for bit."""
    layers, leaves = named(many(), ("A", "B", "m", "bias"))
    whole = None
    for frozen in ((), ("x",), ("A",), ("B",), ("m",), ("bias",), ("x", "A"), ("A", "B"), ("x", "B", "m", "bias")):
        for n, leaf in leaves.items():
            leaf.requires_grad_(n.rstrip("012") not in frozen)
        ys = dora_linear_group(leaves["x"], [packed(t) for t in layers])
        wanted = {n: leaf for n, leaf in leaves.items() if leaf.requires_grad}
        dy = torch.linspace(-1, 1, joined(ys).numel(), dtype=torch.float64, device=device.NAME)
        got = grads(joined(ys), dy, **wanted)
        whole = whole or got
        assert all(torch.equal(d, whole[n]) for n, d in got.items()), frozen
    for leaf in leaves.values():
        leaf.requires_grad_()
    for used in ((1,), (0, 2)):
        ys = dora_linear_group(leaves["x"], [packed(t) for t in layers])
        want = [one(t, True) for t in layers]
        all_of = list(leaves.values())
        sums = (joined([v[i] for i in used]).sum() for v in (ys, want))
        for d, ref in zip(*(torch.autograd.grad(v, all_of, allow_unused=True) for v in sums), strict=True):
            assert (d is None) == (ref is None)
            if d is not None:
                assert_exact(d, ref, f"{used}")


def dm_survives_the_two_traps():
    """Rows with m = 0 and a bias of hundreds, in different layers of one group."""
    sizes = ((48, 8, 0.7), (32, 8, 0.7))
    layers, leaves = named(many(64, (128,), torch.bfloat16, torch.float32, "zero_m", sizes), ("m",))
    layers[1]["bias"] = (layers[1]["bias"].float() + 300).bfloat16()
    got = dora_linear_group(leaves["x"], [packed(t, i == 1) for i, t in enumerate(layers)])
    want = [truth(t, i == 1) for i, t in enumerate(layers)]
    dy = torch.randn_like(joined(got))
    d, ref = grads(joined(got), dy, **leaves), grads(joined(want), dy.double(), **leaves)
    for n in ("m0", "m1"):
        assert rel_l2(d[n], ref[n]) <= 5e-3 and rel_l2(d[n][::3], ref[n][::3]) <= 5e-3, n


def graphs_can_be_kept():
    """A second backward through the same graph: nothing kept was overwritten."""
    layers, leaves = named(many(), ("A", "B", "m", "bias"))
    ys = joined(dora_linear_group(leaves["x"], [packed(t) for t in layers]))
    runs = [torch.autograd.grad(ys.square().sum(), list(leaves.values()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


CHECKS = [
    only_what_is_asked_for,
    dm_survives_the_two_traps,
    graphs_can_be_kept,
]
