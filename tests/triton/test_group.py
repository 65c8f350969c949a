"""Layers that share their input, and the activation between them, on the Triton backend."""

import pytest
import torch

from fdora.functional import DoraLayer, dora_linear_group, dora_mlp, dora_norm
from tests import device, reference
from tests.checks.group import joined, named
from tests.checks.mlp import ACTS
from tests.close import assert_within, rel_l2
from tests.make import grads, tensors, tracked
from tests.triton.marks import DTYPES, HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels
DROPOUT = {"none": {}, "lora": dict(dropout_p=0.3, dropout_mode="lora"), "peft": dict(dropout_p=0.3, dropout_mode="peft")}


def wide(t):
    return {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in t.items()}


def inputs(M, dtype, adapter, shapes, s=(0.7, 0.7, 0.7), kind="plain"):
    layers = [
        tensors(N, K, r, (M,), dtype, adapter, kind, si, seed=i)
        for i, ((N, K, r), si) in enumerate(zip(shapes, s, strict=True))
    ]
    for t in layers:
        t["c"] = dora_norm(t["W"], t["A"], t["B"], s=t["s"], backend="eager")
    return [t | {"x": layers[0]["x"]} for t in layers]


def packed(t, biased):
    return DoraLayer(t["W"], t["A"], t["B"], t["m"], t["s"], t["bias"] if biased else None, t["c"])


def run(f, layers, backend, dy=None, biased=(False, True, False), frozen=()):
    """y and all gradients of ``f(x, members, backend)``."""
    layers, leaves = named(layers, ("A", "B", "m", "bias"))
    for i, yes in enumerate(biased):
        if not yes:
            del leaves[f"bias{i}"]
    for i in frozen:
        for n in "ABm":
            del leaves[f"{n}{i}"]
    members = [
        DoraLayer(t["W"], bias=t["bias"] if yes else None) if i in frozen else packed(t, yes)
        for i, (t, yes) in enumerate(zip(layers, biased, strict=True))
    ]
    y = f(leaves["x"], members, backend)
    torch.manual_seed(1)
    dy = torch.randn(y.shape, device=y.device).to(y.dtype) if dy is None else dy
    return {"y": y.detach()} | grads(y, dy.to(y.dtype), **leaves)


def close_to_eager(f, layers, dtype, what, **more):
    """As in test_linear: eager in float64 is the truth, eager in this dtype sets the budget, a rounding of products at least."""
    got = run(f, layers, "triton", **more)
    torch.manual_seed(1)
    dy = torch.randn(got["y"].shape, device=device.NAME).to(dtype)
    eager, truth = run(f, layers, "eager", dy, **more), run(f, [wide(t) for t in layers], "eager", dy.double(), **more)
    for n, v in got.items():
        floor = torch.finfo(dtype).eps * (truth[n].abs() + truth[n].square().mean().sqrt())
        assert_within(v, truth[n] + (eager[n].double() - truth[n]).abs() + floor, truth[n], f"{what} {n}")


def grouped(**options):
    def f(x, members, backend):
        return joined(dora_linear_group(x, members, backend=backend, **options))

    return f


SHAPES = {"odd": ((33, 70, 5), (40, 70, 20), (17, 70, 3)), "even": ((40, 72, 8), (72, 72, 24), (72, 72, 64))}


@pytest.mark.parametrize("mode", DROPOUT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [3, 70])
def test_a_group_as_the_eager_backend(M, dtype, mode):
    """Few tokens and many, h in one product and (unequal s, dropout) not, a layer without an adapter first or last."""
    seeds = {} if mode == "none" else {"seed": [1, 2, 3]}
    for s, adapter, frozen in (((0.7, 0.7, 0.7), dtype, (0,)), ((0.7, -1.5, 2.0), torch.float32, (2,))):
        layers = inputs(M, dtype, adapter, SHAPES["even" if frozen == (0,) else "odd"], s)
        close_to_eager(grouped(**DROPOUT[mode], **seeds), layers, dtype, f"{s} {frozen}", frozen=frozen)


def mlp(**options):
    def f(x, members, backend):
        return dora_mlp(x, *members, backend=backend, **options)

    return f


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [3, 70])
def test_the_mlp_as_the_eager_backend(M, dtype, act):
    for mode in ("none", "peft") if act == "silu" else ("none",):
        seeds = {} if mode == "none" else {"seed": [1, 2, 3]}
        layers = inputs(M, dtype, dtype, ((72, 40, 24), (72, 40, 8), (40, 72, 16)))
        close_to_eager(mlp(act=act, **DROPOUT[mode], **seeds), layers, dtype, mode)


def test_rows_without_magnitude_keep_their_gradient():
    layers = inputs(70, HALF[0], torch.float32, ((40, 64, 8), (40, 64, 8), (48, 40, 8)), kind="zero_m")
    layers[1]["m"] = layers[1]["c"].clone()  # where gate and up both have none, neither gets a gradient
    got = run(mlp(), layers, "triton", biased=(False,) * 3)
    torch.manual_seed(1)
    dy = torch.randn(70, 48, device=device.NAME).to(HALF[0]).double()
    leaves = [tracked(wide(t), "m") for t in layers]

    def one(t, x):
        return reference.dora(x, *(t[n] for n in "WABms"))

    x = layers[0]["x"].double()
    y = one(leaves[2], torch.nn.functional.silu(one(leaves[0], x)) * one(leaves[1], x))
    for i, ref in enumerate(torch.autograd.grad(y, [t["m"] for t in leaves], dy)):
        rows = slice(int(i == 1), None, 3)  # a gate of 0 lets nothing through to up
        assert rel_l2(got[f"m{i}"], ref) <= 5e-3 and rel_l2(got[f"m{i}"][rows], ref[rows]) <= 5e-3, i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_the_activation(act, dtype):
    """One rounding of float64's result, forward and backward, in any strides; the last also in the place of da."""
    from fdora.eager import act as eager
    from fdora.triton import act as kernels

    gate, up, da = (3 * torch.randn(37, 131, device=device.NAME).to(dtype) for _ in range(3))
    gate[0, :4] = torch.tensor([0.0, -300, 300, -1e-7])
    want = [eager.act_fwd(gate.double(), up.double(), act), *eager.act_bwd(da.double(), gate.double(), up.double(), act)]
    for turn in (lambda t: t.clone(), lambda t: t.T.contiguous().T):
        mine = [turn(t) for t in (gate, up, da)]
        got = [kernels.act_fwd(mine[0], mine[1], act), *kernels.act_bwd(mine[2], mine[0], mine[1], act)]
        for v, ref, of in zip(got, want, ("a", "dgate", "dup"), strict=True):
            near = dict(rtol=max(4e-6, torch.finfo(dtype).eps), atol=4e-6)
            torch.testing.assert_close(v.double(), ref, **near, msg=lambda m: f"{of}: {m}")
    assert kernels.act_fwd(gate[:0], up[:0], act).shape == (0, 131)


def test_opcheck():
    from fdora.triton.act import activation, activation_backward
    from fdora.triton.linear import linear

    gate, up, da = (torch.randn(6, 40, device=device.NAME) for _ in range(3))
    torch.library.opcheck(activation, (gate, up, "silu"))
    torch.library.opcheck(activation_backward, (da, gate, up, "gelu"))
    t = tensors(40, 72, 16, (70,), HALF[0])
    c = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    h = t["x"] @ t["A"].T
    torch.library.opcheck(linear, (*(t[n] for n in "xWABm"), c, None, None, 0.7, 0.0, "lora", "inner", h))


def test_under_transforms():
    """Where ops are opaque dx is added outside of them: the same numbers, for each token by itself too."""
    layers = inputs(5, torch.float32, torch.float32, ((40, 24, 4), (40, 24, 4), (16, 40, 4)), (0.7, 0.5, 2.0))
    x, m, members = layers[0]["x"], layers[0]["m"], [packed(t, True) for t in layers]
    for f, count in ((grouped(), 2), (mlp(), 3)):

        def loss(x, m, f=f, count=count):
            return f(x, [members[0]._replace(m=m), *members[1:count]], "triton").square().sum()

        leaves = x.clone().requires_grad_(), m.clone().requires_grad_()
        want = torch.autograd.grad(loss(*leaves), leaves)
        for got, ref in zip(torch.func.grad(loss, argnums=(0, 1))(x, m), want, strict=True):
            torch.testing.assert_close(got, ref, rtol=1e-4, atol=1e-4)
        each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(x[:, None], m)
        torch.testing.assert_close(each[0][:, 0], want[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(each[1].sum(0), want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif("device.NAME != 'cpu'", reason="a GPU chooses TMA by itself; this is for the interpreter")
def test_adding_onto_tiles_by_tma(monkeypatch):
    """The kernel of Hopper, interpreted: dx of the second layer on that of the first, ragged, several tiles a program."""
    from fdora.triton import gemm

    layers = inputs(70, HALF[0], HALF[0], ((72, 80, 24), (40, 80, 8), (64, 80, 8)))
    for mode in ("none", "peft"):
        f = grouped(**DROPOUT[mode], **({} if mode == "none" else {"seed": [1, 2, 3]}))
        want, launched, real = run(f, layers, "triton"), [], gemm._launch_tma
        with monkeypatch.context() as patch:
            patch.setattr(gemm, "capability", lambda device: 90)
            patch.setattr(gemm, "_launch_tma", lambda *args: (launched.append(args[9][0]), real(*args)))
            got = run(f, layers, "triton")
        assert launched.count("onto") == 2
        for n, v in got.items():
            torch.testing.assert_close(v, want[n], rtol=4e-3, atol=4e-3)
