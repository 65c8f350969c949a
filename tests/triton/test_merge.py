"""The merge kernel against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import torch

from fdora.functional import dora_merge, dora_norm, dora_unmerge
from tests import device, reference
from tests.close import rel_l2
from tests.make import large, tensors
from tests.triton.marks import DTYPES, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels


def truth(t):
    g = reference.scale(t["m"], reference.norm(t["W"], t["A"], t["B"], t["s"]))
    return g[:, None] * (t["W"].double() + t["s"] * t["B"].double() @ t["A"].double())


def triton_merge(t, **extra):
    return dora_merge(t["W"], t["A"], t["B"], t["m"], s=t["s"], backend="triton", **extra)


def triton_unmerge(W, t, c):
    return dora_unmerge(W, t["A"], t["B"], t["m"], s=t["s"], norm=c, backend="triton")


def test_rows_that_had_cancelled_and_lost_rows():
    from fdora.triton.merge import unmerge_fwd

    t = tensors(6, 5, 2, dtype=torch.float32)
    c = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    t["m"][1], t["B"][1], c[1] = 1, 3, 0  # a row that had cancelled to nothing was -s B A, whatever stands there now
    want = -t["s"] * (t["B"] @ t["A"])[1]
    torch.testing.assert_close(triton_unmerge(torch.ones_like(t["W"]), t, c)[1], want, rtol=1e-5, atol=1e-6)
    t = tensors(6, 5, 2, dtype=torch.float32, kind="zero_m")  # past the check of the public function
    c = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    lost = unmerge_fwd(triton_merge(t, norm=c), t["A"], t["B"], t["m"], c, t["s"])
    assert lost.isnan().all(1).tolist() == [True, False, False] * 2


def test_the_start_comes_back_bit_for_bit():
    """B = 0 and m = c: g is exactly one."""
    for dtype in DTYPES:
        t = tensors(130, 200, 8, dtype=dtype, adapter=torch.float32)
        t["B"].zero_()
        t["m"] = dora_norm(t["W"], t["A"], t["B"], s=t["s"], backend="triton")
        assert torch.equal(triton_merge(t), t["W"])


@needs_gpu
def test_past_two_to_the_31_elements():
    W, A, B = large()
    m = torch.ones(len(W), device=device.NAME)
    got = dora_merge(W, A, B, m, s=0.5)[-300:]
    t = dict(W=W[-300:], A=A, B=B[-300:], m=m[-300:], s=0.5)
    assert rel_l2(got, truth(t)) <= 4e-3
