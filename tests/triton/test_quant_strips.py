"""The norm of 4-bit codes along strips, as Hopper takes them: interpreted, or for real with --device cuda."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")


from fdora.triton.codes import written
from fdora.triton.hash import WORDS
from fdora.triton.quant import plan_guarded_quant_norm, plan_stack_norms
from fdora.triton.runtime import walk
from tests import device
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_quant_norm import SCALES, adapter, assert_norm, four, run
from tests.triton.written import launches

GROUPS = {"fp32": 64, "nested": 64, "e8m0": 32, "e4m3*global": 16, "e4m3/global": 16}


def walked(plans):
    return [step.kernel.__name__ == "quant4_strips_kernel" for plan in plans.values() for step in launches(plan, "quant")]


@needs_kernels
@pytest.mark.parametrize(
    ("table", "scales"), [("nf4", "fp32"), ("nf4", "nested"), ("fp4", "nested"), *(("e2m1", s) for s in SCALES[2:])]
)
@pytest.mark.parametrize("shape", [(80, 1280, 16), (33, 832, 12), (64, 2816, 64)], ids=str)
def test_strips(table, scales, shape, as_hopper):
    """Several, the last one shorter; rows that fill no tile; ranks that are no power of two; then s as small and as large as a float32."""
    plans = as_hopper() if device.NAME == "cpu" else {}
    N, K, r = shape
    extreme = ((True, 0.0), (True, 1e-12), (True, -3e-38), (True, 1e30)) if N == 33 else ()
    for high_first, s in ((True, 0.7), (False, -2.0), *extreme):
        case = four(table, scales, N, K, GROUPS[scales], scales in ("fp32", "nested"), high_first)
        A, B = adapter(case, r)
        B = B * (2**14 if abs(s) < 1e-9 else s < 1e9)  # s B A is nothing beside W, and B A is not; or B is 0
        c = run(case, A, B, s)
        assert_norm(c, case.W, A, B, s)
    torch.testing.assert_close(run(case, A, B, s, squared=True), c.square(), rtol=1e-6, atol=0)
    if device.NAME == "cpu":
        assert walked(plans) and all(walked(plans))


@needs_kernels
@pytest.mark.parametrize("scales", ["nested", "fp32"])
def test_every_way_to_call_has_the_same_bits(scales, as_hopper):
    """Some of the rows alone, one behind the other as those of experts, and beside a norm of before."""
    plans = as_hopper() if device.NAME == "cpu" else {}
    case = four("nf4", scales, 128, 2816)
    A, B = adapter(case, 16)
    c, (codes, stored, *more) = run(case, A, B), case.tensors
    if more:  # as many second scales as its groups need
        more[1] = more[1][: more[1].numel() // 2]
    some = (codes[: codes.numel() // 2], stored[: stored.numel() // 2], *more)
    half = case._replace(coded=case.coded._replace(shape=(64, 2816)), tensors=some)
    assert torch.equal(run(half, A, B[:64]), c[:64])
    facts = written([case.coded])
    got = plan_stack_norms.call(torch.stack([A, A]), B.view(2, 64, -1), [*case.tensors], 0.7, *facts)
    assert torch.equal(got.flatten(), c)
    before, unknown = torch.ones_like(c), torch.zeros(WORDS, dtype=torch.int64, device=c.device)

    def guarded(fingerprint):
        tensors = (A, B, before, fingerprint, *case.tensors)
        return walk.run(walk.plan_for(plan_guarded_quant_norm, tensors, *map(tuple, facts)), tensors, (0.7,))

    found, fingerprint = guarded(unknown)
    assert torch.equal(found, c) and torch.equal(guarded(fingerprint)[0], before)
    if device.NAME == "cpu":
        assert len(walked(plans)) == 5 and all(walked(plans))


@needs_kernels
def test_what_lies_otherwise_goes_tile_by_tile(as_hopper):
    plans = as_hopper() if device.NAME == "cpu" else {}
    case = four("nf4", "nested", 64, 1024)
    A, B = adapter(case, 16)
    want = run(case, A, B)
    codes, scales, *more = case.tensors
    shifted = torch.cat([codes[:1], codes])[1:]
    for tensors, a in (((shifted, scales, *more), A), (case.tensors, A.T.contiguous().T)):
        torch.testing.assert_close(run(case._replace(tensors=tensors), a, B), want, rtol=1e-6, atol=0)
    narrow = four("nf4", "fp32", 64, 608, 32)  # not whole tiles
    a, b = adapter(narrow, 16)
    assert_norm(run(narrow, a, b), narrow.W, a, b, 0.7)
    if device.NAME == "cpu":
        assert walked(plans) == [True, False, False, False]
