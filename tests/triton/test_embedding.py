"""The embedding kernel against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import pytest
import torch

import fdora
from fdora.functional import dora_embedding, dora_norm
from tests import device, reference
from tests.checks.embedding import S, numbers, table
from tests.close import rel_l2
from tests.make import grads
from tests.triton.marks import DTYPES, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels


def norm_of(W, A, B, axis):
    return dora_norm(W.T, A, B, s=S, backend="eager") if axis == 0 else dora_norm(W, B.T, A.T, s=S, backend="eager")


def test_a_number_that_is_no_row_has_no_gradient(monkeypatch):
    W, A, B, m = table(5, 40, 3, 0, torch.float32)
    leaves = {"A": A.requires_grad_(), "B": B.requires_grad_(), "m": m.requires_grad_()}
    c, ids = norm_of(W, A, B, 0), torch.tensor([3, -1, 5, 2**40, 4, 3], device=device.NAME)
    dy = torch.randn(6, 40, device=device.NAME)
    got = grads(dora_embedding(ids, W, A, B, m, s=S, norm=c, backend="triton"), dy, **leaves)
    known = torch.tensor([0, 4, 5], device=device.NAME)
    want = grads(dora_embedding(ids[known], W, A, B, m, s=S, norm=c, backend="eager"), dy[known], **leaves)
    assert all(rel_l2(got[n], want[n]) <= 1e-6 for n in leaves)


@pytest.mark.parametrize(("dtype", "r", "many"), [(torch.float32, 20, 9), (torch.float16, 8, 9), (torch.float16, 20, 2)])
def test_a_number_that_is_no_row_is_nan_and_reads_nothing(dtype, r, many, monkeypatch):
    """In each kernel: of any call, of programs that walk, and of two launches."""
    monkeypatch.setattr("fdora.triton.embedding.MANY", many)
    for axis in (0, 1):
        W, A, B, m = table(50, 70, r, axis, dtype)
        ids = torch.tensor([3, -1, 50, 2**40, 4], device=device.NAME)
        for norm in (None, norm_of(W, A, B, axis)):
            y = dora_embedding(ids, W, A, B, m, s=S, norm=norm, norm_axis=axis, backend="triton")
            assert y.isnan().all(1).tolist() == y.isnan().any(1).tolist() == [False, True, True, True, False]


def test_max_norm_is_plain_torch():
    W, A, B, m = table(6, 5, 2, 0, torch.float32)
    ids = numbers(6)
    with fdora.backend("triton"):
        y = dora_embedding(ids, W, A, B, m, s=S, max_norm=0.5)
    assert rel_l2(y, reference.embedding(ids, W, A, B, m, S, max_norm=0.5)) <= 1e-6
    with pytest.raises(fdora.FdoraError, match="`max_norm` must be None with backend='triton'"):
        dora_embedding(ids, W, A, B, m, s=S, max_norm=0.5, backend="triton")


def test_rows_of_zeros():
    W, A, B, m = table(6, 5, 2, 1, torch.float32)
    W[2] = A[:, 2] = 0
    y = dora_embedding(torch.tensor([2, 1], device=device.NAME), W, A, B, m, s=S, norm_axis=1, backend="triton")
    assert (y[0] == 0).all() and y[1].isfinite().all()


@needs_gpu
def test_past_two_to_the_31_elements():
    V, d = 70_000, 32_768
    W = torch.zeros((V, d), device=device.NAME, dtype=torch.bfloat16)
    W[-300:] = torch.randn(300, d, device=device.NAME)
    A, B = torch.randn(8, V, device=device.NAME).bfloat16(), torch.randn(d, 8, device=device.NAME).bfloat16() / 181
    m, c = torch.rand(d, device=device.NAME), torch.rand(d, device=device.NAME) + 1
    ids = torch.arange(V - 300, V, device=device.NAME)
    got = dora_embedding(ids, W, A, B, m, s=S, norm=c)
    assert rel_l2(got, reference.embedding(ids - V + 300, W[-300:], A[:, -300:], B, m, S, c=c)) <= 4e-3
