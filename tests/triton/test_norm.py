"""The norm kernel against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import pytest
import torch

from fdora._records import NormOf
from fdora.eager import norm as eager
from fdora.functional import dora_base_sqnorm, dora_init, dora_norm, dora_norm_state, dora_scale
from tests import device, reference
from tests.close import rel_l2
from tests.make import large, tensors
from tests.triton.marks import DTYPES, HALF, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401
from tests.triton.written import by_tma, launches

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


def test_the_gradient_through_the_norm_is_rounded_once(monkeypatch):
    """Up to r = 32; q B is two terms, for rounded once it would make 0.31 of an eps. A row of zeros has no direction."""
    from fdora.triton import norm_bwd

    W, A, B = ((torch.randn(shape) / 8).to(device.NAME, torch.float16) for shape in ((300, 400), (17, 400), (300, 17)))
    W[3] = B[3] = 0
    given = torch.randn(300, device=device.NAME), W, A, B, eager.norm_fwd(NormOf(W, A, B, 0.7))
    assert (
        norm_bwd.norm_bwd(*given, 0.7, (True, True)) is None
    )  # float16 needs a scale where gradients are small: these are not
    monkeypatch.setattr(norm_bwd, "SERVED", (torch.float16,))
    dA, dB = norm_bwd.norm_bwd(*given, 0.7, (True, True))
    want, _ = eager.norm_bwd(*(t.double() for t in given), 0.7, (True, True))
    assert rel_l2(dA, want) <= 0.27 * torch.finfo(torch.float16).eps and not dB[3].any()
