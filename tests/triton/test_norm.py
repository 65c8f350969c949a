"""The norm kernel against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import itertools

import pytest
import torch

from fdora._records import NormOf
from fdora.eager import norm as eager
from fdora.functional import dora_base_sqnorm, dora_init, dora_norm, dora_norm_state, dora_scale
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.walk import like, run
from tests import device, reference
from tests.close import rel_l2
from tests.make import large, tensors
from tests.triton.marks import DTYPES, HALF, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401
from tests.triton.written import HOPPER, by_tma, launches

pytestmark = needs_kernels


def triton_norm(t, **extra):
    return dora_norm(t["W"], t["A"], t["B"], s=t["s"], backend="triton", **extra)


def test_a_norm_given_of_W_changes_no_bit():
    t = tensors(40, 70, 20, dtype=torch.float16)
    assert torch.equal(triton_norm(t, base_sqnorm=dora_base_sqnorm(t["W"])), triton_norm(t))


@pytest.mark.parametrize("shape", [(130, 264, 144), (128, 256, 192), (200, 136, 136)], ids=str)
def test_descriptors_and_pointers_agree(shape, as_hopper):
    """What TMA takes over above r = 128 on Hopper, and what it must leave alone."""
    plans = as_hopper() if device.NAME == "cpu" else {}
    t = tensors(*shape, dtype=torch.float16)
    wide = {n: torch.zeros(t[n].shape[0], t[n].shape[1] + 1, device=t[n].device, dtype=t[n].dtype) for n in "WAB"}
    shifted = {n: wide[n][:, 1:].copy_(t[n]) for n in "WAB"}
    uneven = torch.cat([t["B"], t["B"][:, :1]], 1)[:, :-1]  # begins at 16 bytes, its rows do not
    want = reference.norm(t["W"], t["A"], t["B"], t["s"])
    t["W"][5] = float("nan")
    for one in (
        {},
        {"W": shifted["W"]},
        {"A": shifted["A"]},
        {"B": shifted["B"]},
        {"B": t["B"].T.contiguous().T},
        {"B": uneven},
    ):
        got = triton_norm(t | one)
        assert got[5].isnan() or "W" in one
        got[5] = want[5]
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    if device.NAME == "cpu":
        assert [by_tma(step) for plan in plans.values() for step in launches(plan, "norm")] == [True, *[False] * 5]
    state = dora_norm_state(t["W"])
    state = dora_norm(t["W"], t["A"], t["B"], s=t["s"], state=state, backend="triton")
    assert torch.equal(state.c.nan_to_num(), triton_norm(t).nan_to_num())


def of_strips(step):
    """Whether a launch of norm_kernel walks along strips: it has a span then."""
    return step.args[step.kernel.arg_names.index("span")] is not None


@pytest.mark.parametrize("adapter", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(144, 1168, 8), (128, 1024, 64), (48, 528, 12), (64, 520, 12), (64, 528, 72), (80, 1088, 128)], ids=str
)
def test_strips(shape, adapter, as_hopper):
    """One slab of the rank on Hopper: several strips, the last one ragged, with and without a norm of before. 16 divides the
    rows: how many of a row's parts one thread adds depends on that."""
    plans = as_hopper() if device.NAME == "cpu" else {}
    t = tensors(*shape, dtype=torch.float16, adapter=adapter)
    want, got = reference.norm(t["W"], t["A"], t["B"], t["s"]), triton_norm(t)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    if adapter == torch.float16:  # of float32 ones too little room would be left for terms of them
        assert torch.equal(triton_norm(t, max_bytes=200_000), got)
        half = t | {"W": t["W"][:32], "B": t["B"][:32]}  # a shard of the rows
        assert torch.equal(triton_norm(half), got[:32])
    if device.NAME == "cpu":
        one_slab = (3 if adapter == torch.float32 else 1) * shape[2] <= 128
        assert all(
            of_strips(step) == (one_slab and shape[1] % 16 == 0) for plan in plans.values() for step in launches(plan, "norm")
        )
    state = dora_norm(t["W"], t["A"], t["B"], s=t["s"], state=dora_norm_state(t["W"]), backend="triton")
    assert torch.equal(state.c, got)


@needs_gpu
def test_start_is_an_exact_no_op_on_the_gpu():
    for dtype in DTYPES:
        W = torch.randn(384, 1536, device=device.NAME).to(dtype)
        p = dora_init(W, 16)
        assert (dora_scale(p.m, dora_norm(W, p.A, p.B, s=2.0)) == 1).all()


@needs_gpu
def test_past_two_to_the_31_elements():
    W, A, B = large()
    got = dora_norm(W, A, B, s=0.5)[-300:]
    torch.testing.assert_close(got.double(), reference.norm(W[-300:], A, B[-300:], 0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(130, 70, 3), (64, 96, 16), (130, 1100, 17), (300, 400, 33), (200, 130, 80)], ids=str)
def test_the_gradient_through_the_norm(shape, monkeypatch):
    """Of every mix of dtypes, each wanted by itself too; a row of zeros, whose norm has no direction."""
    from fdora.triton import norm_bwd

    N, K, r = shape
    rand = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=rand).to(device.NAME) / 8 for size in ((N, K), (r, K), (N, r))]
    for dtype, a, b in itertools.product(HALF, (0, 1), (0, 1)):
        monkeypatch.setattr(norm_bwd, "SERVED", (dtype,))  # float16 needs a scale where gradients are small: these are not
        W, A, B = (t.to(torch.float32 if wide else dtype) for t, wide in zip(drawn, (0, a, b), strict=True))
        W[3] = B[3] = 0
        c, dc = eager.norm_fwd(NormOf(W, A, B, 0.7)), torch.randn(N, generator=rand).to(device.NAME)
        truth = eager.norm_bwd(*(t.double() for t in (dc, W, A, B, c)), 0.7, (True, True))
        whole = norm_bwd.norm_bwd(dc, W, A, B, c, 0.7, (True, True))
        assert not whole[1][3].any()
        for got, want, rest, own in zip(whole, truth, (a, b), (b, a), strict=True):
            # rounded where it is stored and where the other factor is an operand; a second term of bfloat16 leaves eps^2 / 4
            assert got.dtype == (torch.float32 if rest else dtype)
            eps = torch.finfo(dtype).eps
            assert rel_l2(got, want) <= (max(1e-6, eps**2 / 4) if rest and own else eps), (dtype, a, b, rel_l2(got, want))
        assert r > 32 or rel_l2(whole[0], truth[0]) <= 0.27 * eps, "q B is rounded once, which makes it 0.31"
        for needs in ((True, False), (False, True)):
            for part, all_of, need in zip(norm_bwd.norm_bwd(dc, W, A, B, c, 0.7, needs), whole, needs, strict=True):
                assert torch.equal(part, all_of) if need else part is None
        onto = [torch.randn(t.shape, generator=rand).to(t) for t in (A, B)]
        onto[0] = onto[0].T.contiguous().T  # as no product leaves it
        for got, apart, more in zip(norm_bwd.norm_bwd(dc, W, A, B, c, 0.7, (True, True), onto), whole, onto, strict=True):
            assert rel_l2(got, apart.double() + more.double()) <= torch.finfo(got.dtype).eps, (dtype, a, b)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_gradient_through_the_norm_by_descriptors(at_once, joined):
    """As Hopper's plans have it, of more tiles than one, in one launch and in two."""
    from fdora.triton.norm_bwd import plan_norm_bwd

    N, K, r = 320, 296, 136
    rand, t = torch.Generator().manual_seed(0), HALF[0]
    W, A, B, *onto = ((torch.randn(size, generator=rand) / 8).to(device.NAME, t) for size in [(N, K), *[(r, K), (N, r)] * 2])
    c, dc = eager.norm_fwd(NormOf(W, A, B, 0.7)), torch.randn(N, generator=rand).to(device.NAME)
    onto = onto if joined else (None, None)
    tensors = (dc, W, A, B, c, *onto)
    on = device_of(W.device) if device.NAME != "cpu" else HOPPER
    on = on._replace(num_sms=8 if at_once else 2)
    plan = plan_norm_bwd([None if v is None else like(v) for v in tensors], on, (True, True))
    if on.capability == 90:
        products = launches(plan, "norm_products" if at_once else "gemm")
        assert len(products) == (1 if at_once else 2) and all(map(by_tma, products))
    more = [None if v is None else v.double() for v in onto]
    want = eager.norm_bwd(*(v.double() for v in (dc, W, A, B, c)), 0.7, (True, True), more)
    for got, exact in zip(run(plan, tensors, (0.7,)), want, strict=True):
        assert rel_l2(got, exact) <= torch.finfo(t).eps


def test_the_gradient_through_a_norm_of_other_dtypes_is_plain_torch():
    from fdora.triton import norm_bwd

    for dtype in (torch.float16, torch.float32):
        W, A, B = (torch.randn(4, 4, device=device.NAME, dtype=dtype) for _ in range(3))
        c = torch.ones(4, device=device.NAME)
        assert norm_bwd.norm_bwd(c, W, A, B, c, 0.7, (True, True)) is None
        got, want = (dora_norm(W, A.requires_grad_(), B, s=0.7, detach=False, backend=b).sum() for b in ("triton", "eager"))
        assert rel_l2(*(torch.autograd.grad(y, A)[0] for y in (got, want))) <= 1e-3
