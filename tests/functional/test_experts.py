"""Every promise of tests/checks/experts.py, transforms, and faults that they notice."""

import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from fdora import FdoraError
from fdora.functional import experts
from tests.checks.experts import CHECKS, mixture, ours
from tests.close import assert_exact
from tests.make import grads
from tests.test_mutations import caught_by, swap

ENDS = [2, 2, 6]
NAMES = ("x", "A", "B", "m", "bias")


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_experts(check):
    check()


FAULTS = [
    ("zip([0, *ends[:-1]], ends, strict=True)", "zip([0, *ends[:-1]], [*ends[1:], ends[-1]], strict=True)"),
    ("W.unbind(), A.unbind()", "W.unbind(), A.unbind()[::-1]"),
    ("bias=b, norm=c", "bias=None, norm=c"),
    ("bias=b, norm=c", "bias=b, norm=None if c is None else c.detach()"),
    ("if rest.shape[0] or not parts", "if not parts"),
    ("like.new_zeros", "like.new_ones"),
]


@pytest.mark.parametrize(("old", "new"), FAULTS, ids=[new for _, new in FAULTS])
def test_fault_is_caught(monkeypatch, old, new):
    swap(monkeypatch, experts, old, new)
    assert caught_by(CHECKS), "no check noticed"


def loss(trained, t, ends=ENDS):
    return ours(t | trained, ends).square().sum()


def plain(t, ends=ENDS):
    leaves = {n: t[n].detach().clone().requires_grad_() for n in NAMES}
    return grads(loss(leaves, t, ends), None, **leaves)


def test_transforms():
    t = mixture()
    trained, want = {n: t[n] for n in NAMES}, plain(t)
    for n, d in grad(loss)(trained, t).items():
        assert_exact(d, want[n], n)
    bank = {n: torch.stack([v, 2 * v]) for n, v in trained.items()}
    for n, d in vmap(grad(loss), in_dims=(0, None))(bank, t).items():
        for i in range(2):
            assert_exact(d[i], plain(t | {k: v[i] for k, v in bank.items()})[n], n)
    leaves = {n: v.clone().requires_grad_() for n, v in trained.items()}
    checkpoint(lambda *args: loss(dict(zip(NAMES, args, strict=True)), t), *leaves.values(), use_reentrant=False).backward()
    for n, leaf in leaves.items():
        assert_exact(leaf.grad, want[n], n)


def test_compiled_with_numbers():
    t = mixture()
    torch._dynamo.reset()
    leaves = {n: t[n].clone().requires_grad_() for n in NAMES}
    value = torch.compile(lambda leaves, t: loss(leaves, t), fullgraph=True, backend="aot_eager")(leaves, t)
    for n, d in grads(value, None, **leaves).items():
        assert_exact(d, plain(t)[n], n)
    with pytest.raises(Exception, match=r"Python numbers in code that is compiled|FdoraError"):  # torch 2.8 leaves the text out
        torch.compile(lambda t, ends: ours(t, ends), fullgraph=True, backend="aot_eager")(t, torch.tensor(ENDS))


def test_messages():
    t = mixture()
    for ends, words in (
        ([2, 6], "`offsets` must be 3 numbers (the experts of `W`), got 2."),
        ([2, 1, 6], "`offsets` must be rising from 0 to 7 at most (the tokens of `x`), got [2, 1, 6]."),
        ([2, 4, 8], "`offsets` must be rising from 0 to 7 at most"),
        ([2, 4.0, 6], "`offsets` must be a tensor or a list of whole numbers"),
        (torch.tensor([1.0, 2, 3]), "`offsets` must be int64 or int32, got float32."),
    ):
        with pytest.raises(FdoraError) as error:
            ours(t, ends)
        assert str(error.value).startswith("fdora.dora_experts: ") and words in str(error.value)
    for name, wrong, words in (
        (
            "B",
            t["B"].transpose(1, 2),
            "`B` must be (E, N, r) with E=3 (from `W`), N=6 (from `W`), r=2 (from `A`), got (3, 2, 6)",
        ),
        ("W", t["W"].clone().requires_grad_(), "`W` must be frozen"),
        ("m", t["m"].half(), "`m` must be float32 or float64, got float16."),
    ):
        with pytest.raises(FdoraError) as error:
            ours(t | {name: wrong}, ENDS)
        assert words in str(error.value)
