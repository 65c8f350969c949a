"""Every promise of tests/checks/experts.py, transforms, and faults that they notice."""

import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from fdora import FdoraError
from fdora.eager import experts as eager
from fdora.eager import multi
from fdora.functional import dora_norm, experts, experts_mlp
from tests.checks import experts as checks
from tests.checks.experts import CHECKS, IDS, layers_of_mlps, mixture, mlp, ours
from tests.close import assert_exact
from tests.make import grads
from tests.test_mutations import caught_by, checks_of, swap

ENDS = [2, 2, 6]
NAMES = ("x", "A", "B", "m", "bias")


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_experts(check):
    check()


FAULTS = [
    ("zip([0, *ends[:-1]], ends, strict=True)", "zip([0, *ends[:-1]], [*ends[1:], ends[-1]], strict=True)"),
    ("each, A.unbind()", "each, A.unbind()[::-1]"),
    ("bias=b, norm=c", "bias=None, norm=c"),
    ("bias=b, norm=c", "bias=b, norm=None if c is None else c.detach()"),
    ("if rest.shape[0]:", "if not ys:"),
    ("ys[0].new_zeros", "ys[0].new_ones"),
    (
        "combine(sorted_rows(fn, spread(x, to, name), layer, to.offsets, name), pairs(gates)",
        "combine(sorted_rows(fn, spread(x, to, name), layer, to.offsets, name), 2 * gates",
    ),
]
FAULTS = [(experts, *each) for each in FAULTS] + [
    (eager, "rows.to(acc) * gates.reshape(-1)[order, None]", "rows.to(acc) * gates.reshape(-1)[order * 0, None]"),
    (eager, "part * gates[:, j, None]", "part * gates[:, 0, None]"),
    (eager, "dy.to(acc) * rows[place[:, j]]", "dy.to(acc) * rows[place[:, 0]]"),
    (eager, "torch.where(gate > LIMIT, 0,", "torch.where(gate > 2 * LIMIT, 0,"),
    (eager, "(up > LIMIT) | (up < -LIMIT), 0,", "(up > LIMIT), 0,"),
    (eager, "share + SHARPNESS * v * share", "share + v * share"),
    (experts_mlp, "act), down, of_each", "act), down._replace(s=2 * down.s), of_each"),
    (multi, "own, None, max_bytes)", "2 * own, None, max_bytes)"),
]


@pytest.mark.parametrize(("module", "old", "new"), FAULTS, ids=[new for *_, new in FAULTS])
def test_fault_is_caught(monkeypatch, module, old, new):
    swap(monkeypatch, module, old, new)
    assert caught_by(checks_of(checks)), "no check noticed"


def test_no_tokens_and_tokens_of_nobody_have_gradients():
    """Zeros, of everything that is trained: a batch that a layer of experts does not see breaks no backward."""
    t = mixture()
    for ids in (IDS[:0], IDS[:0, 0], torch.full_like(IDS, -1)):
        leaves = {n: t[n].detach().requires_grad_() for n in NAMES}
        y = ours(t | leaves | {"x": leaves["x"][: len(ids)]}, None, ids=ids)
        assert y.shape == (*ids.shape, 6)
        assert not any(d.any() for d in grads(y.sum(), None, **leaves).values())


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
    text = (
        "Python numbers in code that is compiled" if torch.__version__ >= "2.9" else "FdoraError"
    )  # torch 2.8 leaves the text out
    with pytest.raises(Exception, match=text):
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
    ids = IDS.to(t["x"].device)
    gates = torch.ones(IDS.shape).to(ids.device)
    for ends, extra, words in (
        (None, {}, "`offsets` must be given, or ids, not both, got neither."),
        (ENDS, {"ids": ids}, "`offsets` must be given, or ids, not both, got both."),
        (ENDS, {"gates": gates}, "`gates` must be None without ids"),
        (None, {"ids": ids[:3]}, "`ids` must be (7, k), k experts for each token of `x`, got (3, 2)."),
        (None, {"ids": ids, "gates": gates[:, :1]}, "`gates` must be (7, 2), as `ids`, got (7, 1)."),
        # numbers that lie on a GPU are not looked at
        *([] if ids.is_cuda else [(None, {"ids": ids + 1}, "`ids` must be from -1 to 2, got 0 to 3.")]),
    ):
        with pytest.raises(FdoraError) as error:
            ours(t, ends, **extra)
        assert words in str(error.value)
    with pytest.raises(FdoraError, match="`detach` must be left out for a stack of experts"):
        dora_norm(t["W"], t["A"], t["B"], s=1.0, detach=False)
    x, up, down = layers_of_mlps()
    for change, words in (
        ({"act": "relu"}, "fdora.dora_experts_mlp: `act` must be one of silu, gelu, gelu_tanh, gpt_oss, got 'relu'."),
        ({"up": down}, "`gate_up.W` must be (E, 2 F, K) beside down.W (E, N, F), got (3, 6, 4) beside down.W (3, 6, 4)."),
        ({"down": down | {"A": down["A"][:, :, :3]}}, "fdora.dora_experts_mlp: down: `A` must be (E, r, K)"),
        ({"down": down | {"m": None}}, "fdora.dora_experts_mlp: `down` must be with an adapter, m and s"),
    ):
        call = {"x": x, "up": up, "down": down, "act": "silu"} | change
        with pytest.raises(FdoraError) as error:
            mlp(**call, offsets=ENDS)
        assert words in str(error.value)
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
