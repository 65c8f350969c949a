"""Every promise of tests/checks/multi.py, by segments and without a look at the offsets."""

import itertools

import pytest
import torch

from fdora import FdoraError
from fdora.autograd import quant
from fdora.eager import multi
from fdora.functional import dora_linear_multi, dora_norm, dora_stack, dora_unstack
from fdora.quant import quantize
from tests import device
from tests.checks.multi import BITS, CHECKS, MASKED, case, dy_of, together, truth, with_gradients
from tests.close import assert_exact


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_multi(check):
    check()


@pytest.mark.skipif("device.NAME != 'cpu'", reason="elsewhere nothing looks; runs with --device cpu")
@pytest.mark.parametrize("check", MASKED, ids=lambda f: f.__name__)
def test_without_a_look_at_the_offsets(check):
    check()


@pytest.mark.skipif("device.NAME != 'cpu'", reason="by segments on a CPU only; runs with --device cpu")
@pytest.mark.parametrize("check", BITS, ids=lambda f: f.__name__)
def test_bits(check):
    check()


@pytest.mark.skipif("device.NAME != 'cpu'", reason="elsewhere there is one way; runs with --device cpu")
def test_what_one_way_kept_the_other_reads():
    """A backward may run where values cannot be read, though its forward could (compiled autograd), or the other way round."""
    for kind, first, route in itertools.product(("plain", "zero_m"), (False, True), ("offsets", "ids")):
        t = case(kind=kind, route=route, bias=False).tracked()
        want = with_gradients(truth, t, dy_of(t))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multi, "_readable", lambda bank: first)
            y = together(t)
            patch.setattr(multi, "_readable", lambda bank: not first)
            found = torch.autograd.grad(y, list(t.leaves().values()), dy_of(t))
        for n, d in zip(t.leaves(), found, strict=True):
            assert_exact(d, want[n], f"{kind} {first} {n}")


@pytest.mark.skipif("device.NAME != 'cpu'", reason="elsewhere what backward reads is kept apart; runs with --device cpu")
def test_an_output_that_backward_reads_is_left_as_it_is():
    y = together(case(bias=False).tracked())
    with pytest.raises(RuntimeError, match=r"fdora.dora_linear_multi: `y` must be left as it is.*Write `y = c \* y`"):
        y.mul_(2).sum().backward()


def test_nothing_is_kept_without_a_gradient():
    t = case()
    with torch.no_grad():
        assert together(t).grad_fn is None
    y = together(t._replace(bias=None).tracked())
    kept = [v for v in y.grad_fn.saved_tensors if v is not None and v.shape == y.shape]
    assert len(kept) == 1 and (kept[0].data_ptr() == y.data_ptr() or device.NAME != "cpu")


def test_lengths_and_scalings_are_tensors_that_may_change():
    """The same call with other values: nothing of the first is kept."""
    t = case((4, 0, 3), 2)
    A, B, m = dora_stack(t.adapters)
    offsets = torch.tensor([4, 4, 7], dtype=torch.int32, device=device.NAME)
    s = torch.tensor(t.s, device=device.NAME)
    args = (t.x, t.W, A, B, m)
    first = dora_linear_multi(*args, s=s.double(), offsets=offsets, bias=t.bias)
    assert_exact(first, truth(t))
    offsets += torch.tensor([-3, 0, 2], device=device.NAME)
    s *= 2
    ids = torch.tensor([0] * 1 + [1] * 3 + [2] * 5, device=device.NAME)
    other = t._replace(ids=ids, s=tuple(2 * each for each in t.s))
    torch.testing.assert_close(dora_linear_multi(*args, s=s, offsets=offsets, bias=t.bias), truth(other))


@pytest.mark.skipif("device.NAME != 'cpu'", reason="elsewhere values are not looked at; runs with --device cpu")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(offsets=None), "`offsets` must be given, or ids, not both, got neither."),
        (dict(ids=torch.zeros(9, dtype=torch.int64)), "`offsets` must be given, or ids, not both, got both."),
        (dict(offsets=torch.tensor([4, 4, 7])), "`offsets` must be int32, got int64."),
        (
            dict(offsets=torch.tensor([4, 3, 7], dtype=torch.int32)),
            "`offsets` must be ends, in order, of segments of x, got [4, 3, 7] for 9 tokens.",
        ),
        (dict(offsets=torch.tensor([4, 4, 10], dtype=torch.int32)), "got [4, 4, 10] for 9 tokens."),
        (dict(offsets=torch.tensor([-1, 4, 9], dtype=torch.int32)), "got [-1, 4, 9] for 9 tokens."),
        (dict(offsets=None, ids=torch.tensor([0] * 8 + [3])), "`ids` must be from -1 to 2, got 0 to 3."),
        (dict(offsets=None, ids=torch.tensor([0] * 8 + [-2])), "`ids` must be from -1 to 2, got -2 to 0."),
        (dict(offsets=None, ids=torch.zeros(8, dtype=torch.int64)), "`ids` must be (9,), one for each token, got (8,)."),
        (dict(s=[1.0, 2.0]), "`s` must be 3 numbers, one for each adapter, got 2."),
        (dict(s=2.0), "`s` must be 3 numbers, one for each adapter, got a float."),
        (dict(s=[1.0, float("nan"), 2.0]), "`s` must be a finite Python number, got nan."),
        (dict(s=torch.ones(2)), "`s` must be (3,), one for each adapter, got (2,)."),
        (dict(s=torch.ones(3, requires_grad=True)), "`s` must be without a gradient, got requires_grad=True."),
        (dict(ranks=[1, 2]), "`ranks` must be 3 of 1 to 3, got [1, 2]."),
        (dict(ranks=[1, 2, 4]), "`ranks` must be 3 of 1 to 3, got [1, 2, 4]."),
        (dict(ranks=[1, 0, 2]), "`ranks` must be 3 of 1 to 3, got [1, 0, 2]."),
        (dict(m=None, norm=torch.ones(3, 6).double()), "`norm` must be None without m, got a Tensor."),
        (dict(A=torch.ones(3, 5).double()), "`A` must be (G, r, K) with K=5 (from `W`), got (3, 5)."),
        (dict(dropout_p=0.5, seed=[1, 2]), "`seed` must be one, or 3, one for each adapter, got 2."),
        (dict(dropout_p=0.5, seed=torch.tensor([1, 2])), "`seed` must be one, or 3, one for each adapter, got 2."),
        (dict(dropout_p=0.5, seed=-1), "`seed` must be in [0, 2**63), got -1."),
        (
            dict(dropout_p=0.5, seed=torch.ones(3, dtype=torch.int64, device="meta")),
            "`seed` must be on cpu (the device of `x`), got meta.",
        ),
        (dict(dropout_p=[0.1, 0.2, 1.5]), "`dropout_p` must be in [0, 1), got 1.5."),
        (dict(dropout_p=[0.1, 0.2]), "`dropout_p` must be one, or 3, one for each adapter, got 2."),
    ],
)
def test_messages(change, text):
    t = case((4, 0, 3), 2)
    A, B, m = dora_stack(t.adapters)
    given = dict(x=t.x, W=t.W, A=A, B=B, m=m, s=t.s, offsets=torch.tensor([4, 4, 7], dtype=torch.int32)) | change
    with pytest.raises(FdoraError) as caught:
        dora_linear_multi(**given)
    assert str(caught.value).startswith("fdora.dora_linear_multi: ") and text in str(caught.value), str(caught.value)


def test_messages_of_banks():
    t = case(dtype=torch.float32)
    one, other = t.adapters[0], t.adapters[2]
    A, B, m = dora_stack(t.adapters)
    for call, text in (
        (lambda: dora_stack([]), "fdora.dora_stack: `params` must be at least one adapter, got none."),
        (
            lambda: dora_stack([one, other._replace(A=other.A[:, 1:])]),
            "`params[1].A` must be (r1, K) with K=5 (from `params[0].A`), got (3, 4).",
        ),
        (lambda: dora_stack([one, other._replace(A=other.A.double())]), "`params[1].A` must be float32, got float64."),
        (lambda: dora_stack([one, None]), "fdora.dora_stack: `params[1]` must be a DoraParams (A, B, m), got a NoneType."),
        (lambda: dora_stack([one, other._replace(m=None)]), "`params[1].m` must be a Tensor, as in others, got None."),
        (
            lambda: dora_unstack((A, B, m[0])),
            "fdora.dora_unstack: `m` must be (G, N) with G=3 (from `A`), N=6 (from `B`), got (6,).",
        ),
        (lambda: dora_unstack((A, B, m), [1]), "fdora.dora_unstack: `ranks` must be 3 of 1 to 3, got [1]."),
        (
            lambda: dora_norm(t.W, A, B, s=t.s, detach=False),
            "fdora.dora_norm: `detach` must be left out for a bank of adapters, got a value.",
        ),
        (
            lambda: dora_norm(t.W, A, B, s=t.s, squared=True),
            "fdora.dora_norm: `squared` must be left out for a bank of adapters, got a value.",
        ),
        (lambda: dora_norm(t.W, A, B, s=1.0), "fdora.dora_norm: `s` must be 3 numbers, one for each adapter, got a float."),
        (
            lambda: dora_norm(t.W, A[:0], B[:0], s=[]),
            "fdora.dora_norm: `A` must be a bank of at least one adapter, got (0, 3, 5).",
        ),
    ):
        with pytest.raises(FdoraError) as caught:
            call()
        assert text in str(caught.value), str(caught.value)


def test_compiled_by_ids_with_a_symbolic_length():
    """Tokens in one axis or in two, whose numbers the compiler does not know; the first call has passed no check before."""
    W, A, B, m = torch.randn(6, 4), torch.randn(2, 3, 4), torch.randn(2, 6, 3), torch.rand(2, 6)

    def call(x, ids):
        return dora_linear_multi(x, W, A, B, m, s=[0.5, 2.0], ids=ids)

    for lead, flat in (((7,), False), ((3, 5), False), ((3, 5), True)):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        for more in (0, 4):
            x = torch.randn(*(n + more for n in lead), 4)
            ids = torch.randint(-1, 2, (x[..., 0].numel(),) if flat else x.shape[:-1])
            assert_exact(compiled(x, ids), call(x, ids))


def test_norms_of_a_bank_decode_some_rows_at_a_time(monkeypatch):
    t = case(N=12, K=64, dtype=torch.float32)
    Q, (A, B, _) = quantize(t.W, "nf4"), dora_stack(t.adapters)
    want = dora_norm(Q, A, B, s=t.s)
    monkeypatch.setattr(quant, "default_bytes", lambda device: 2 * 5 * 64 * 4)
    assert len(quant.norm_parts(Q, None)) == 3
    torch.testing.assert_close(dora_norm(Q, A, B, s=t.s), want, rtol=1e-6, atol=0)
