"""PEFT's dropout by a product of e4m3 codes of what is dropped, against float64 and beside two products in half precision."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_norm
from fdora.triton import dropped
from fdora.triton.linear import plan_backward, plan_forward
from tests import device
from tests.checks.multi import case, dy_of, seeds_of, together, with_gradients
from tests.close import rel_l2
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compile import assert_fits, build, kind
from tests.triton.test_compile import device as gpu
from tests.triton.written import BF16, FP32, alike, kernels, launches

S, NAMES = 0.7, ("y", "dx", "dA", "dB", "dm", "dbias")


def layer(M, N, K, r, spread, dtype):
    g = torch.Generator().manual_seed(0)
    x, W, dy = (torch.randn(shape, generator=g) for shape in ((M, K), (N, K), (M, N)))
    A, B, bias = (torch.randn(shape, generator=g) / 8 for shape in ((r, K), (N, r), (N,)))
    x, W, A, B, bias, dy = (t.to(device.NAME, dtype) for t in (x, W, A, B, bias, dy))
    m = dora_norm(W, A, B, s=S) * (1 + spread * torch.randn(N, generator=g).to(device.NAME))
    return x, W, A, B, m.to(dtype), bias, dy


def results(t, p, backend, dtype=None):
    x, W, A, B, m, bias, dy = (each if dtype is None else each.to(dtype) for each in t)
    leaves = [each.clone().requires_grad_() for each in (x, A, B, m, bias)]
    x, A, B, m, bias = leaves
    how = dict(norm=dora_norm(*t[1:4], s=S), dropout_p=p, dropout_mode="peft", seed=5, backend=backend)
    y = dora_linear(x, W, A, B, m, s=S, bias=bias, **how)
    return dict(zip(NAMES, [y.detach(), *torch.autograd.grad(y, leaves, dy)], strict=True))


def of_dm(p):
    """dm sums dy v, and v has what three bits of fraction leave of L W^T."""
    return 0.036 * (p / (1 - p)) ** 0.5


@pytest.fixture
def small(as_hopper, monkeypatch):
    """Few tokens and a small W take it too, and so does float16, in which the interpreter multiplies rightly."""
    if device.NAME == "cpu":
        as_hopper()
    monkeypatch.setattr(dropped, "LEAST", 64)
    monkeypatch.setattr(dropped, "DTYPE", torch.float16)


@needs_kernels
@pytest.mark.parametrize("cached", [0, 1 << 24], ids=["masks inside", "a copy"])
@pytest.mark.parametrize(("M", "N", "K", "r", "p"), [(96, 160, 208, 20, 0.3), (70, 272, 144, 80, 0.05)])
def test_the_same_layer(M, N, K, r, p, cached, small, monkeypatch, chosen_anew):
    """Without what is dropped errors would be 0.05 sqrt(p) and more. No copy of D(x) is made where masks are drawn inside."""
    monkeypatch.setattr("fdora.triton.dropout.CACHED", cached)
    t = layer(M, N, K, r, 0.05, torch.float16)
    got, want = results(t, p, "triton"), results(t, p, "eager", torch.float64)
    for name in NAMES:
        assert rel_l2(got[name], want[name]) < (2e-3 if name != "dm" else of_dm(p)), name
    assert sum(kernels(plan)["drop_kernel"] for plan in chosen_anew.values()) == (2 if cached else 0)
    monkeypatch.setattr(dropped, "LEAST", 2048)
    chosen_anew.clear()
    both = results(t, p, "triton")
    assert not torch.equal(both["y"], got["y"]) and not torch.equal(both["dx"], got["dx"])


@needs_kernels
def test_layers_on_one_x(small):
    one, other = layer(96, 160, 208, 20, 0.05, torch.float16), layer(96, 176, 208, 20, 0.1, torch.float16)
    grads = []
    for backend in ("triton", "eager"):
        x = one[0].clone().requires_grad_()
        layers = [DoraLayer(W, A, B, m, S, bias) for _, W, A, B, m, bias, _ in (one, other)]
        ys = dora_linear_group(x, layers, dropout_p=0.2, dropout_mode="peft", seed=[3, 4], backend=backend)
        grads.append(torch.autograd.grad(ys, x, [one[-1], other[-1]])[0])
    assert rel_l2(*grads) < 2e-3


def bank_results(t, ps, dy, backend):
    call = partial(together, dropout_p=ps, dropout_mode="peft", seed=seeds_of(t), backend=backend)
    return with_gradients(call, t, dy)


@needs_kernels
@pytest.mark.parametrize("route", ["offsets", "ids"])
@pytest.mark.parametrize("ps", [[0.3] * 4, [0.3, 0.0, 0.05, 0.1]], ids=["one ratio", "apart"])
def test_many_adapters(route, ps, small, monkeypatch, chosen_anew):
    """Each with its g, mask, ratio and rank, some without tokens; tokens of nobody keep the base layer's. One product of codes
    for all of them, forward and backward."""
    t = case((50, 0, 61, 33), 16, 160, 208, (20, 3, 16, 70), (0.7, -1.5, 2.0, 1.0), torch.float16, route=route, spread=0.05)
    dy = dy_of(t)
    got, want = bank_results(t, ps, dy, "triton"), bank_results(t.double(), ps, dy.double(), "eager")
    assert [kernels(plan)["gemm_tma_kernel"] for plan in chosen_anew.values() if "multi" in plan.name] == [1, 1]
    for name in got:
        if want[name].any():
            most = 2e-3 if name[0] != "m" else 1.1 * of_dm(ps[int(name[1:])])  # a sum over few tokens
            assert rel_l2(got[name], want[name]) < most, name
        else:
            assert not got[name].any(), name
    nobody = t.ids < 0
    base = torch.nn.functional.linear(t.x[nobody].double(), t.W.double(), t.bias.double())
    assert rel_l2(got["y"][nobody], base) < 1e-3 and rel_l2(got["x"][nobody], dy[nobody].double() @ t.W.double()) < 1e-3
    monkeypatch.setattr(dropped, "LEAST", 2048)
    chosen_anew.clear()
    both = bank_results(t, ps, dy, "triton")
    assert not any(kernels(plan)["gemm_tma_kernel"] for plan in chosen_anew.values())
    assert not torch.equal(both["y"], got["y"]) and not torch.equal(both["x"], got["x"])


@pytest.mark.skipif("device.NAME == 'cpu'", reason="needs a GPU; runs with --device cuda on a machine with one")
@pytest.mark.parametrize(("spread", "most"), [(0.05, 1.1), (0.1, 1.25), (0.3, 2.0)])
def test_errors_beside_two_products_in_half_precision(spread, most, monkeypatch, chosen_anew):
    t = layer(2100, 2048, 2304, 64, spread, BF16)
    exact, got = results(t, 0.05, "eager", torch.float64), results(t, 0.05, "triton")
    monkeypatch.setattr(dropped, "LEAST", 1 << 20)
    chosen_anew.clear()
    both = results(t, 0.05, "triton")
    assert not torch.equal(both["y"], got["y"]) and not torch.equal(both["dx"], got["dx"])
    for name in NAMES:
        more, roundings = 0.0 if name != "dm" else of_dm(0.05), 1.0 if name != "dx" else 2**0.5  # z is rounded; dy was not
        assert rel_l2(got[name], exact[name]) < most * roundings * rel_l2(both[name], exact[name]) + more, name


@pytest.mark.skipif("INTERPRETED", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET")
@pytest.mark.parametrize(("target", "r"), [(90, 64), (90, 384), (100, 64)])
def test_it_compiles(target, r, tmp_path):
    M, N, K = 4096, 4096, 2048
    la = [alike(N, K, dtype=BF16), alike(r, K, dtype=BF16), alike(N, r, dtype=BF16), *[alike(N, dtype=FP32)] * 3]
    la += [alike(dtype=torch.int64)]
    x, wide = alike(M, K, dtype=BF16), alike(M, N, dtype=BF16)
    plans = [plan_forward([x, *la], gpu(target), 0.05, "peft", ("output",), True)]
    needs = (True, True, True, False, True)
    plans += [plan_backward([x, alike(M, r, dtype=BF16), wide, wide, *la], gpu(target), 0.05, "peft", (True,), True, needs)]
    assert all(dropped.WORDS in plan.path for plan in plans)
    for step in {kind(step): step for plan in plans for step in launches(plan)}.values():
        assert_fits(build(step, target), target, tmp_path)
