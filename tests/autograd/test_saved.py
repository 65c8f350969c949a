"""What is kept for backward, and that nothing is computed that nobody asked for."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fdora.functional import dora_compose, dora_delta, dora_linear, dora_norm
from tests import device
from tests.make import tensors, tracked

M, N, K, r = 64, 48, 40, 8
NAMES = ("x", "A", "B", "m")


def kept_activations(t, **extra):
    """y, and the distinct (M, N) tensors among what autograd keeps."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: saved.append(v) or v, lambda v: v):
        y = dora_linear(*(t[n] for n in ("x", "W", "A", "B", "m")), s=t["s"], **extra)
    return y, [v for v in saved if v.shape == (M, N)]


def make(kind="plain", dtype=torch.float32, names=NAMES):
    return tracked(tensors(N, K, r, (M,), dtype, kind=kind), *names)


def test_the_output_is_kept_and_nothing_else_of_its_size():
    if device.NAME != "cpu":
        pytest.skip("eager on a GPU keeps inner, to look at g it would have to wait; runs with --device cpu")
    y, kept = kept_activations(make())
    assert len(kept) == 1 and kept[0].data_ptr() == y.data_ptr()


@pytest.mark.parametrize(("kind", "extra"), [("plain", "bias"), ("zero_m", None), ("plain", "keep_inner")])
def test_inner_is_kept_where_the_output_will_not_do(kind, extra):
    t = make(kind)
    y, kept = kept_activations(t, **({"bias": t["bias"]} if extra == "bias" else {"keep_inner": True} if extra else {}))
    assert len(kept) == 1 and kept[0].data_ptr() != y.data_ptr()


def test_nothing_is_kept_for_a_frozen_magnitude():
    assert kept_activations(make(names=("x", "A", "B")))[1] == []
    with torch.no_grad():
        assert kept_activations(make())[1] == []


def test_changing_the_output_in_place_is_an_error_or_allowed():
    t = make()
    args = [t[n] for n in ("x", "W", "A", "B", "m")]
    if device.NAME == "cpu":
        y = dora_linear(*args, s=0.7)
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = dora_linear(*args, s=0.7, keep_inner=True)
    y += 1
    y.sum().backward()


def flops(t, wanted, **extra):
    y = dora_linear(*(t[n] for n in ("x", "W", "A", "B", "m")), s=t["s"], norm=extra.pop("norm"), **extra)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(y, [t[n] for n in wanted], torch.ones_like(y))
    return counter.get_total_flops()


@pytest.mark.parametrize("wanted", [("x",), ("A",), ("B",), ("m",), ("x", "A", "B", "m"), ("A", "B"), ("B", "m")], ids="".join)
def test_only_the_needed_products_run(wanted):
    t = make(names=wanted)
    norm = dora_norm(*(t[n].detach() for n in ("W", "A", "B")), s=t["s"])
    # the counter sees torch's products, not those of kernels
    dh = 2 * M * N * r if {"x", "A"} & set(wanted) else 0
    want = {"x": 2 * M * N * K + 2 * M * r * K, "A": 2 * M * r * K, "B": 2 * M * N * r, "m": 0}
    assert flops(t, wanted, norm=norm, backend="eager") == dh + sum(want[n] for n in wanted)


def test_forward_makes_no_dense_product_when_the_norm_is_given():
    t = make(names=())
    norm = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    with FlopCounterMode(display=False) as counter:
        dora_linear(*(t[n] for n in ("x", "W", "A", "B", "m")), s=t["s"], norm=norm, backend="eager")
    assert counter.get_total_flops() == 2 * M * (N * K + K * r + r * N)


def second(f, t):
    (first,) = torch.autograd.grad(f(t).square().sum(), t, create_graph=True)
    torch.autograd.grad(first.square().sum(), t)


def test_second_derivatives_raise():
    t = tensors()
    base, lora, g = torch.randn(3, 4), torch.randn(3, 4), torch.rand(4)
    cases = {
        "dora_linear": (lambda A: dora_linear(t["x"], t["W"], A, t["B"], t["m"], s=0.7), t["A"]),
        "dora_norm": (lambda A: dora_norm(t["W"], A, t["B"], s=0.7, detach=False), t["A"]),
        "dora_compose": (lambda v: dora_compose(v, lora, g, s=0.7), base),
        "dora_delta": (lambda v: dora_delta(v, lora, g, s=0.7), base),
    }
    for op, (f, at) in cases.items():
        with pytest.raises(NotImplementedError, match=f"second derivatives of .*{op}"):
            second(f, at.requires_grad_())
        with pytest.raises(NotImplementedError, match=f"second derivatives of .*{op}"):
            torch.func.grad(lambda v, f=f: torch.func.grad(lambda u: f(u).square().sum())(v).square().sum())(at.detach())
        with pytest.raises(NotImplementedError, match=f"second derivatives of .*{op}"):
            torch.func.jacrev(torch.func.jacrev(lambda v, f=f: f(v).square().sum()))(at.detach())
