"""Every promise of tests/checks/embedding.py, and what only a CPU shows."""

import pytest
import torch

from fdora import FdoraError
from fdora.functional import dora_embedding, dora_norm
from tests import device
from tests.checks.embedding import CHECKS, S, numbers, table
from tests.make import grads
from tests.memory import peak_bytes


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_embedding(check):
    check()


@pytest.mark.parametrize("axis", [0, 1])
def test_nothing_of_the_size_of_the_table(axis):
    """Neither forward nor backward; the norm of the columns keeps to dora_norm's blocks of 12 MiB."""
    V, d = 60_000, 128
    W = torch.randn(V, d, device=device.NAME)
    A, B = torch.randn(2, V, device=device.NAME).requires_grad_(), torch.randn(d, 2, device=device.NAME).requires_grad_()
    m = torch.ones((d, V)[axis], device=device.NAME).requires_grad_()
    c = dora_norm(W.T, A, B, s=S) if axis == 0 else None
    ids, leaves = numbers(V, (32,)), {"A": A, "B": B, "m": m}

    def step():
        y = dora_embedding(ids, W, A, B, m, s=S, norm=c, norm_axis=axis)
        return grads(y, torch.ones_like(y), **leaves)

    assert peak_bytes(step, device.NAME) < 4 * A.nbytes + 1e6 < W.nbytes / 8
    if axis == 0:
        budget = (12 << 20) if device.NAME == "cpu" else (64 << 20)
        assert peak_bytes(lambda: dora_embedding(ids, W, A, B, m, s=S), device.NAME) < 1.2 * budget
        if device.NAME == "cpu":
            assert 1.2 * budget < W.nbytes


@pytest.mark.skipif(
    "device.NAME != 'cpu'", reason="a GPU cannot raise: tests/triton has its row of NaN; runs with --device cpu"
)
def test_a_number_that_is_no_row():
    W, A, B, m = table()
    for wrong in (-1, 11):
        with pytest.raises(IndexError):
            dora_embedding(torch.tensor([0, wrong]), W, A, B, m, s=S)


def test_sums_of_rows_that_share_a_number_as_a_gpu_makes_them():
    from fdora.eager.embedding import _by_sorting, _segment_sum

    for T, V, dtype in (
        (0, 5, torch.int64),
        (1, 5, torch.int64),
        (7, 5, torch.int32),
        (1000, 40, torch.int64),
        (513, 1, torch.int64),
    ):
        ids = torch.randint(0, V, (T,), dtype=dtype, device=device.NAME)
        values = torch.randn(T, 3, dtype=torch.float64, device=device.NAME)
        want = torch.zeros(V, 3, dtype=torch.float64, device=device.NAME).index_add(0, ids, values)
        for made in (_by_sorting, _segment_sum):
            torch.testing.assert_close(made(values, ids, V), want)


def test_each_axis_is_checked_by_itself():
    """Also where the same tensors were right along the other one."""
    W, A, B, m = table(dtype=torch.float32)
    ids = numbers()
    dora_embedding(ids, W, A, B, m, s=S)
    with pytest.raises(FdoraError, match=r"`m` must be \(V,\)"):
        dora_embedding(ids, W, A, B, m, s=S, norm_axis=1)
