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
