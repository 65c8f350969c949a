"""Comparisons that raise."""

import torch


def rel_l2(got, truth):
    """||got - truth|| / ||truth|| in float64; NaN never passes a comparison with it."""
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_exact(got, truth, what=""):
    """Float64 results of two orders of summation."""
    torch.testing.assert_close(got, truth, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}")


def assert_within(got, naive, truth, what=""):
    """No worse than twice what naive code in the same dtype loses against the truth, plus one rounding; max and RMS."""
    assert got.shape == truth.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    if got.dtype == torch.float64:  # the truth has no more digits than this
        return assert_exact(got, truth.double(), what)
    eps = torch.finfo(got.dtype).eps
    size = truth.double().abs().max().item()
    mine, theirs = (got.double() - truth).abs(), (naive.double() - truth).abs()
    worst = tuple(i.item() for i in torch.unravel_index(mine.argmax(), mine.shape))
    for kind, a, b in (("max", mine.max().item(), theirs.max().item()), ("RMS", rms(mine), rms(theirs))):
        limit = 2 * b + eps * (size if kind == "max" else rms(truth.double()))
        assert a <= limit, f"{what}: {kind} error {a:.3g} > {limit:.3g}; worst at {worst}"


def rms(t):
    return t.square().mean().sqrt().item()


def outputs_and_gradients(call, leaves):
    """What ``call()`` gives, and the gradients of a random projection of all of it."""
    ys = call()
    ys = list(ys) if isinstance(ys, (tuple, list)) else [ys]
    dys = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).to(y) for i, y in enumerate(ys)]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


def assert_near(got, want, limit):
    """Outputs and gradients of two calls; zeros where there are no others."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and (rel_l2(a, b) < limit if b.any() else not a.any())


def assert_compiles(call, leaves, limit):
    """A call that is one graph has the outputs and the gradients of the plain one."""
    torch._dynamo.reset()
    assert_near(
        *(outputs_and_gradients(each, leaves) for each in (torch.compile(call, backend="aot_eager", fullgraph=True), call)),
        limit,
    )
