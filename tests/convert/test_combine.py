"""combine and to_lora against dense float64, and against what PEFT makes of the same question."""

import pytest
import torch

from fdora import FdoraError
from fdora.convert import Adapter, adapter_scale, combine, merge, to_lora
from tests.convert.make import columns, layer, merged, missed, target

WEIGHTS = [0.6, -0.3, 1.2]


def three(**more):
    W, first = layer(r=3, **more)
    return W, [first, *(layer(r=r, seed=i, s=1.5, **more)[1] for i, r in ((1, 5), (2, 1)))]


def conv():
    """A convolution (N, K, 3, 3) and three adapters in PEFT's shapes."""
    W, adapters = three(K=4 * 9)
    shaped = [p._replace(A=p.A.view(-1, 4, 3, 3), B=p.B.view(24, -1, 1, 1)) for p in adapters]
    return W.view(24, 4, 3, 3), shaped


@pytest.mark.parametrize("kind", ["rows", "columns", "conv", "bf16"])
def test_merge_and_scale(kind):
    W, p = layer(dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "columns":
        p = columns(p, W)
    if kind == "conv":
        W, (p, *_) = conv()
    got = merge(W, p)
    assert got.dtype == W.dtype and got.shape == W.shape
    assert (got.double() - merged(W, p)).norm() <= (4e-3 if kind == "bf16" else 1e-6) * W.norm()
    g = adapter_scale(W, p)
    c = (W.double().flatten(1) + p.s * p.B.double().flatten(1) @ p.A.double().flatten(1)).square().sum(p.norm_axis).sqrt()
    torch.testing.assert_close(g.double(), p.m.double() / c, rtol=1e-6, atol=0)
    lora = p._replace(m=None)
    assert (adapter_scale(W, lora) == 1).all()
    assert (merge(W, lora).double() - merged(W, lora)).norm() <= (4e-3 if kind == "bf16" else 1e-6) * W.norm()


def test_one_adapter_with_weight_one_is_itself():
    W, p = layer()
    got, error = combine(W, [p], [1.0])
    assert error < 1e-6
    torch.testing.assert_close(got.A, p.A, rtol=0, atol=0)
    torch.testing.assert_close(got.B, p.s * p.B, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got.m, p.m, rtol=1e-5, atol=0)
    assert got.s == 1.0 and (merge(W, p) - W).norm() > 0.1 * W.norm()


@pytest.mark.parametrize("kind", ["rows", "columns", "conv", "bf16", "half adapters", "with lora", "lora, then columns"])
def test_exact_at_the_sum_of_ranks(kind):
    W, adapters = conv() if kind == "conv" else three(dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "half adapters":
        W, adapters = W.bfloat16(), [Adapter(p.A.half(), p.B.half(), p.m.bfloat16(), p.s) for p in adapters]
    if "columns" in kind:
        adapters = [columns(p, W) for p in adapters]
    if kind == "lora, then columns":
        adapters[0] = adapters[0]._replace(m=None, norm_axis=1)
    if kind == "with lora":
        adapters[0] = adapters[0]._replace(m=None)
    got, error = combine(W, adapters, WEIGHTS)
    want = target(W, adapters, WEIGHTS)
    assert len(got.A) == 9 and got.A.shape[1:] == adapters[0].A.shape[1:] and got.A.dtype == got.m.dtype == torch.float32
    assert missed(W, merged(W, got), want) < 1e-5 and error < 1e-5
    assert missed(W, merged(W, adapters[0]), want) > 0.5  # the parts alone are something else


def alternating(W, want, r):
    """Least squares over a diagonal g and a rank-r C of want = diag(g) W + C, by turns: the best that DoRA of rank r can do."""
    g = ((want * W).sum(1) / W.square().sum(1))[:, None]
    for _ in range(100):
        U, S, V = torch.linalg.svd(want - g * W, full_matrices=False)
        C = (U[:, :r] * S[:r]) @ V[:r]
        g = (((want - C) * W).sum(1) / W.square().sum(1))[:, None]
    return ((g * W + C - want).norm() / (want - W).norm()).item()


@pytest.mark.parametrize(("shape", "r", "room"), [((128, 96), 4, 1.005), ((128, 96), 8, 1.005), ((24, 20), 8, 1.05)])
def test_at_a_lower_rank_close_to_the_best_and_honest(shape, r, room):
    W, adapters = three(N=shape[0], K=shape[1])
    want = target(W, adapters, WEIGHTS)
    got, error = combine(W, adapters, WEIGHTS, r=r)
    assert len(got.A) == r
    assert missed(W, merged(W, got), want) == pytest.approx(error, rel=1e-4)
    assert error <= room * alternating(W.double(), want, r)


def test_too_large_an_error_is_refused():
    W, adapters = three()
    with pytest.raises(
        FdoraError, match=r"at most 0.01 \(`max_error`\), got 0\.\d+ at rank 2. Raise r or max_error. 9 is exact"
    ):
        combine(W, adapters, WEIGHTS, r=2, max_error=0.01)
    with pytest.raises(FdoraError, match="Merge instead"):
        to_lora(W, adapters[0], r=2, max_error=0.01)
    assert combine(W, adapters, WEIGHTS, max_error=1e-5)[1] < 1e-5


@pytest.mark.parametrize("kind", ["zero rows", "m = 0", "nothing", "W cancelled"])
def test_rows_that_break_naive_code(kind):
    W, p = layer()
    q, weights = layer(seed=1)[1], [0.5, 0.5]
    if kind == "zero rows":
        W[::2] = p.B[::2] = q.B[::2] = p.m[::2] = q.m[::2] = 0
    if kind == "m = 0":
        p.m[3] = 0
    if kind == "nothing":
        p = q = Adapter(p.A, torch.zeros_like(p.B), None, 1.0)
    if kind == "W cancelled":
        g = adapter_scale(W, p)
        p.m.copy_(2 * p.m / g)  # g = 2, so that W' = W - (2 (W + s B A) - W) = -2 s B A has no W left
        q, weights = p, [-0.5, -0.5]
    got, error = combine(W, [p, q], weights)
    assert all(t.isfinite().all() for t in got[:3])
    want = target(W, [p, q], weights)
    if kind == "nothing":
        torch.testing.assert_close(merged(W, got), W.double(), rtol=1e-6, atol=1e-6)
        assert error == 0
    else:
        assert missed(W, merged(W, got), want) < 2e-5 and error < 2e-5
        got, error = combine(W, [p, q], weights, r=4)
        assert missed(W, merged(W, got), want) == pytest.approx(error, rel=1e-3, abs=2e-5)


@pytest.mark.parametrize("kind", ["rows", "columns", "conv", "bf16"])
def test_to_lora_is_the_best_of_its_rank(kind):
    W, p = layer(N=96, K=72, r=6, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "columns":
        p = columns(p, W)
    if kind == "conv":
        W, p = W.view(96, 8, 3, 3), p._replace(A=p.A.view(6, 8, 3, 3), B=p.B.view(96, 6, 1, 1))
    change = merged(W, p) - W.double()
    for r in (1, 6, 20, 72):
        got, error = to_lora(W, p, r=r)
        assert got.m is None and len(got.A) == r and got.B.shape[2:] == p.B.shape[2:]
        S = torch.linalg.svdvals(change.flatten(1))
        best = (S[r:].norm() / S.norm()).item()
        assert best - 1e-6 <= error <= 1.002 * best + 1e-6
        assert missed(W, merged(W, got), W.double() + change) == pytest.approx(error, rel=1e-3, abs=1e-6)
    state = torch.get_rng_state()
    again, _ = to_lora(W, p, r=6)
    assert torch.equal(again.A, to_lora(W, p, r=6)[0].A) and torch.equal(state, torch.get_rng_state())


def test_a_lora_comes_back_as_it_is():
    W, p = layer(N=96, K=72, r=6)
    assert to_lora(W, p._replace(m=None), r=6)[1] < 1e-5
    assert to_lora(W, p, r=6)[1] > 0.01  # the magnitude is what costs


def test_what_is_asked_wrongly():
    W, p = layer()
    for weights, adapters in (([1.0], []), ([1.0, 2.0], [p]), ([], [])):
        with pytest.raises(FdoraError, match="one number for each adapter"):
            combine(W, adapters, weights)
    with pytest.raises(FdoraError, match="of one norm_axis"):
        combine(W, [p, columns(p, W)], [1.0, 1.0])
    with pytest.raises(FdoraError, match=r"`r` must be in \[1, 20\] for this weight, got 21"):
        to_lora(W, p, r=21)
    with pytest.raises(FdoraError, match="`norm_axis` must be 1 for a convolution"):
        merge(W.view(24, 5, 2, 2), p._replace(A=p.A.view(3, 5, 2, 2), norm_axis=0))
    with pytest.raises(FdoraError, match=r"`A` must be .r, K. with K=20"):
        merge(W, p._replace(A=p.A.T))
    with pytest.raises(FdoraError, match="`W` must be a matrix"):
        merge(W[0], p)
    with pytest.raises(FdoraError, match=r"fdora.convert: `W` must be .*, got a Linear\. Pass a tensor of it, as W"):
        merge(torch.nn.Linear(20, 24), p)
