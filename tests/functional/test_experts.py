"""Every promise of tests/checks/experts.py, transforms, and faults that they notice."""

import pytest
import torch

from fdora import FdoraError
from fdora.eager import experts as eager
from fdora.eager import multi
from fdora.functional import dora_norm, experts, experts_mlp
from tests.checks import experts as checks
from tests.checks.experts import CHECKS, IDS, layers_of_mlps, mixture, mlp, ours
from tests.close import assert_compiles, assert_exact
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
    ("bias=biases[e], norm=norms[e]", "bias=None, norm=norms[e]"),
    ("norm=norms[e]", "norm=None if norms[e] is None else norms[e].detach()"),
    ("if rest.shape[0]:", "if not ys:"),
    ("ys[0].new_zeros", "ys[0].new_ones"),
    ("    y = combine(rows, ", "    gates = None if gates is None else 2 * gates\n    y = combine(rows, "),
]
FAULTS = [(experts, *each) for each in FAULTS] + [
    (eager, "rows.to(acc) * gates.reshape(-1)[order, None]", "rows.to(acc) * gates.reshape(-1)[order * 0, None]"),
    (eager, "(up > LIMIT) | (up < -LIMIT), 0,", "(up > LIMIT), 0,"),
    (eager, "share + SHARPNESS * v * share", "share + v * share"),
    (experts_mlp, "fn, a, down, of_each", "fn, a, down._replace(s=2 * down.s), of_each"),
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


def loss(trained, t):
    return ours(t | trained, ENDS).square().sum()


@pytest.mark.parametrize(
    ("key", "numbers"), [("ends", torch.tensor(ENDS)), ("ids", IDS), ("ids", IDS[:, 0])], ids=["offsets", "ids", "one id"]
)
def test_gradients_of_torch_func(key, numbers):
    """What torch.func.grad has wrapped has values that can be read."""
    t = mixture()

    def value(trained, numbers):
        return ours(t | trained, **{"ends": None, key: numbers}).square().sum()

    leaves = {n: t[n].clone().requires_grad_() for n in NAMES}
    want, given = grads(value(leaves, numbers), None, **leaves), {n: t[n] for n in NAMES}
    for inside in (lambda trained: value(trained, numbers), value):
        got = torch.func.grad(inside)(given, *([numbers] if inside is value else []))
        for n, d in got.items():
            assert_exact(d, want[n], n)


def test_compiled_with_numbers():
    t = mixture()
    leaves = {n: t[n].clone().requires_grad_() for n in NAMES}
    assert_compiles(lambda: loss(leaves, t), leaves.values(), 1e-9)
    text = (
        "Python numbers in code that is compiled" if torch.__version__ >= "2.9" else "FdoraError"
    )  # torch 2.8 leaves the text out
    with pytest.raises(Exception, match=text):
        torch.compile(lambda t, ends: ours(t, ends), fullgraph=True, backend="aot_eager")(t, torch.tensor(ENDS))


def test_messages():
    t = mixture()
    ids = IDS.to(t["x"].device)
    gates, B = torch.ones(IDS.shape).to(ids.device), t["B"].transpose(1, 2)
    x, up, down = layers_of_mlps()
    narrow = down | {"A": down["A"][:, :, :3]}

    def call(ends=ENDS, change=None, **extra):
        return lambda: ours(t | (change or {}), ends, **extra)

    def of_mlps(**change):
        return lambda: mlp(**{"x": x, "up": up, "down": down, "act": "silu"} | change, offsets=ENDS)

    for wrong, words in (
        (call([2, 6]), "fdora.dora_experts: `offsets` must be 3 numbers (the experts of `W`), got 2."),
        (call([2, 1, 6]), "`offsets` must be rising from 0 to 7 at most (the tokens of `x`), got [2, 1, 6]."),
        (call([2, 4, 8]), "`offsets` must be rising from 0 to 7 at most"),
        (call([2, 4.0, 6]), "`offsets` must be a tensor or a list of whole numbers"),
        (call(torch.tensor([1.0, 2, 3])), "`offsets` must be int64 or int32, got float32."),
        (call(None), "`offsets` must be given, or ids, not both, got neither."),
        (call(ids=ids), "`offsets` must be given, or ids, not both, got both."),
        (call(gates=gates), "`gates` must be None without ids"),
        (call(None, ids=ids[:3]), "`ids` must be (7, k), k experts for each token of `x`, got (3, 2)."),
        (call(None, ids=ids, gates=gates[:, :1]), "`gates` must be (7, 2), as `ids`, got (7, 1)."),
        # numbers that lie on a GPU are not looked at
        *([] if ids.is_cuda else [(call(None, ids=ids + 1), "`ids` must be from -1 to 2, got 0 to 3.")]),
        (lambda: dora_norm(t["W"], t["A"], t["B"], s=1.0, detach=False), "`detach` must be left out for a stack of experts"),
        (of_mlps(act="relu"), "fdora.dora_experts_mlp: `act` must be one of silu, gelu, gelu_tanh, gpt_oss, got 'relu'."),
        (of_mlps(up=down), "`gate_up.W` must be (E, 2 F, K) beside down.W (E, N, F), got (3, 6, 4) beside down.W (3, 6, 4)."),
        (of_mlps(down=narrow), "fdora.dora_experts_mlp: down: `A` must be (E, r, K)"),
        (of_mlps(down=down | {"m": None}), "fdora.dora_experts_mlp: `down` must be with an adapter, m and s"),
        (call(change={"B": B}), "must be (E, N, r) with E=3 (from `W`), N=6 (from `W`), r=2 (from `A`), got (3, 2, 6)"),
    ):
        with pytest.raises(FdoraError) as error:
            wrong()
        assert words in str(error.value)
