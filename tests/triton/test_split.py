"""float32 factors as scaled float16 ones: what comes back, over the whole range of float32."""

import pytest
import torch

from fdora.functional import dora_norm
from tests import device, reference
from tests.make import tensors
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import copied, results_of

pytestmark = needs_kernels


def split(A, B):
    """As float64: what the kernels made of A and B, each with its scale."""
    from fdora.triton import split as plans

    def write(plan, A, B):
        (a, by_k), (b, by_n) = plans.split_A(plan, plan.matrix(A)), plans.split_B(plan, plan.matrix(B))
        for name, t in (("a", a), ("by_k", by_k), ("b", b), ("by_n", by_n)):
            wide = t if len(t.shape) == 2 else t.words((1, *t.shape), (0, 1), t.dtype)
            copied(plan, name, wide)

    a, by_k, b, by_n = results_of(write, A, B)
    return a, by_k[0], b, by_n[0]


@pytest.mark.parametrize("shape", [(5, 3, 2), (70, 37, 24), (40, 33, 130)], ids=str)
def test_the_product_comes_back(shape):
    N, K, r = shape
    B, A = (torch.randn(*size, device=device.NAME) for size in ((N, r), (r, K)))
    B *= 10.0 ** torch.linspace(-30, 30, N, device=device.NAME)[:, None]  # each row has a size of its own
    A *= 10.0 ** torch.linspace(6, -6, K, device=device.NAME)
    B[0] = A[:, 1] = 0
    a, by_k, b, by_n = split(A, B)
    assert a.dtype == b.dtype == torch.float16 and a.shape[0] == b.shape[1] and a.shape[0] % 32 == 0
    got = (b.double() * by_n.double()[:, None]) @ (a.double() * by_k.double())
    size = B.double().abs() @ A.double().abs()
    assert ((got - B.double() @ A.double()).abs() <= 3 * 2.0**-22 * size).all()


def test_smallest_largest_nan_and_inf():
    B = torch.tensor([[1e-45, 0], [1e-38, 2e-39], [3e38, -1e38], [float("nan"), 1], [float("inf"), 1], [1, 1]])
    B, A = B.to(device.NAME), torch.eye(2, device=device.NAME)
    a, by_k, b, by_n = split(A, B)
    got = (b.double() * by_n.double()[:, None]) @ (a.double() * by_k.double())
    torch.testing.assert_close(got[:3], B[:3].double(), rtol=1e-6, atol=1e-45)
    assert got[3:5].isfinite().logical_not().any(1).all() and (got[5] == 1).all()


def test_a_budget_without_room_for_them_changes_a_little_at_most():
    """Whole, in blocks of rows, or not split at all."""
    from fdora.triton.split import rows_at_a_time

    t = tensors(300, 264, 8, dtype=torch.float32)
    truth = reference.norm(t["W"], t["A"], t["B"], t["s"])
    seen = set()
    for max_bytes in (None, 40_000, 20_000):
        seen.add(rows_at_a_time(300, 264, 8, max_bytes, 20))
        c = dora_norm(t["W"], t["A"], t["B"], s=t["s"], max_bytes=max_bytes, backend="triton")
        torch.testing.assert_close(c.double(), truth, rtol=1e-6, atol=0)
    assert seen == {300, 128, 0}
