"""The kernels of experts: the grouped product with a W of each, what stands around it, and an MLP as one node, against float64."""

from functools import partial

import pytest
import torch

import fdora
from fdora.eager import experts as eager
from fdora.functional import dora_experts
from fdora.triton import experts as kernels_of
from tests import device, reference
from tests.checks.experts import S, layers_of_mlps, mixture, mlp, ours, weights_of
from tests.close import assert_compiles, rel_l2
from tests.make import grads
from tests.memory import saved
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import kernels

pytestmark = needs_kernels
CLOSE = 4 * torch.finfo(HALF[0]).eps
NAMES = ("x", "A", "B", "m", "bias")
# experts, N, K, r, tokens, ends: without tokens, with few, ending within tiles; tokens of nobody
SHAPES = {"few": (4, 40, 48, 3, 9, [2, 2, 3, 8]), "many": (3, 128, 64, 20, 280, [130, 130, 277])}


def drawn(shape, dtype):
    E, N, K, r, T, ends = SHAPES[shape]
    return mixture(E, N, K, r, T, dtype, None, spread=0.02), ends


def parts(layer, t, ends, bias):
    """The tokens of each expert through a layer of its own."""
    begins = [0, *ends[:-1]]
    own = t["bias"] if bias else [None] * len(ends)
    found = [
        layer(t["x"][i:j], *(t[n][e] for n in "WABm"), S, own[e]) for e, (i, j) in enumerate(zip(begins, ends, strict=True))
    ]
    return torch.cat([*found, found[0].new_zeros(len(t["x"]) - ends[-1], found[0].shape[1])])


def test_one_launch_whatever_the_lengths(chosen_anew):
    """Nothing asks for a length: other segments are other numbers in the same launches, and one product serves all experts."""
    t, ends = drawn("many", HALF[0])
    made = []
    for each in (ends, [0, 0, 0], [1, 279, 280]):
        y = ours(t, torch.tensor(each, device=device.NAME), backend="triton")
        assert rel_l2(y, parts(reference.dora, t, each, True)) < CLOSE if each[-1] else not y.any()
        made.append(list(chosen_anew.values()))
    assert made[0] == made[1] == made[2]
    found = sum((kernels(p) for p in made[0]), start=kernels(made[0][0])) - kernels(made[0][0])
    assert found["multi_gemm_pointer_kernel"] + found["multi_gemm_tma_kernel"] == found["norm_kernel"] == 1


def test_strangers_stay_strangers(as_hopper):
    """What is not finite in one expert, or in a token of one, reaches nobody else's tokens and no other gradient, though the
    tiles of its tokens end in those of others."""
    as_hopper()
    well, want = slice(130, 280), None
    for what in ("", "W", "A", "x"):
        t, ends = drawn("many", HALF[0])
        norm = torch.ones(3, 128, device=device.NAME)
        if what:
            (t["x"][:1] if what == "x" else t[what][0]).fill_(float("nan"))
        leaves = {n: t[n].requires_grad_() for n in NAMES}
        y = ours(t, torch.tensor(ends, device=device.NAME), norm=norm, backend="triton")
        torch.manual_seed(0)
        found = grads(y, torch.randn_like(y), **leaves)
        got = [y[well], found["x"][well], *(found[n][2] for n in NAMES[1:])]
        want = want or got
        assert all(map(torch.equal, got, want)), what


def test_the_gated_activation():
    """A NaN stays one, though a limit lies on it."""
    for dtype in (*HALF, torch.float32):
        z, da = (4 * torch.randn(37, n, device=device.NAME).to(dtype) for n in (140, 70))
        z[0, :2] = float("nan")
        for act in eager.ACTS:
            for got, want in (
                (kernels_of.gated_fwd(z, act), eager.gated_fwd(z, act)),
                (kernels_of.gated_bwd(da, z, act), eager.gated_bwd(da, z, act)),
            ):
                assert torch.equal(got.isnan(), want.isnan())
                assert rel_l2(got.nan_to_num(), want.nan_to_num()) < 8 * torch.finfo(dtype).eps, act


def test_an_mlp_keeps_what_it_says():
    """x as it came, z, both h and y: no sorted copy, no f(gate) up."""
    ids = torch.randint(0, 3, (24, 2), generator=torch.Generator().manual_seed(0)).to(device.NAME)
    x, up, down = layers_of_mlps(HALF[0], None, 3, 24, 16, 40, 4, 24)
    gates, call = weights_of(ids, torch.float32), partial(mlp, x, up, down, "silu", False, ids=ids, backend="triton")
    assert not saved(lambda: call(gates=gates))[1]
    for v in (x, up["A"], down["B"], up["m"]):
        v.requires_grad_()
    given = {t.data_ptr() for part in (up, down) for t in part.values()} | {x.data_ptr(), gates.data_ptr()}
    found = saved(lambda: call(gates=gates))[1]
    kept = {t.data_ptr(): tuple(t.shape) for t in found if t.data_ptr() not in given and t.dtype == HALF[0]}
    assert sorted(kept.values()) == [(48, 4), (48, 4), (48, 32), (48, 40)]


def test_second_derivatives_raise_and_the_backend_is_chosen():
    t, ends = drawn("few", HALF[0])
    x = t["x"].requires_grad_()
    with fdora.backend("triton"):
        y = ours(t, ends)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="of dora_experts are"):
        torch.autograd.grad(dx.sum(), x)
    x, up, down = layers_of_mlps(HALF[0], None, 3, 24, 16, 40, 4, 24)
    x.requires_grad_()
    ids = torch.zeros(24, 1, dtype=torch.int64, device=device.NAME)
    for gates in (None, weights_of(ids).requires_grad_()):
        y = mlp(x, up, down, "silu", ids=ids, gates=gates, backend="triton")
        (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="experts"):
            torch.autograd.grad(dx.sum(), x)


def test_compiled_with_tensors():
    """Nothing is read on the host: offsets and ids may be tensors of a graph."""
    t, ends = drawn("few", torch.float32)
    ids = torch.randint(0, 4, (9, 2), device=device.NAME)
    tensors = t["x"].requires_grad_(), t["W"], t["A"].requires_grad_(), t["B"], t["m"]
    for route in ({"offsets": torch.tensor(ends, device=device.NAME)}, {"ids": ids, "gates": weights_of(ids, torch.float32)}):
        call = partial(dora_experts, *tensors, s=S, bias=t["bias"], backend="triton", **route)
        assert_compiles(call, [t["x"], t["A"]], 1e-6)
