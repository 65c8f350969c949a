"""Half-precision products come back with their float32 digits, whichever way a device gets them."""

import pytest
import torch

from fdora.eager import _matmul
from fdora.eager._matmul import acc_dtype, is_plain, matmul
from tests import device
from tests.close import rel_l2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(64, 200, 96), (1, 33, 7), (0, 5, 4), (130, 1, 3)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_unrounded(dtype, shape, turned):
    M, K, N = shape
    a, b = torch.randn(M, K, device=device.NAME).to(dtype), torch.randn(K, N, device=device.NAME).to(dtype)
    if turned:
        a, b = a.T.contiguous().T, b.T.contiguous().T
    y = matmul(a, b)
    assert y.dtype == acc_dtype(dtype) and y.shape == (M, N)
    if M:
        assert rel_l2(y, a.double() @ b.double()) <= (1e-5 if dtype != torch.float64 else 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_bf16_instructions(monkeypatch, dtype):
    """Where the CPU has none, operands are widened, a few columns at a time."""
    monkeypatch.setattr(_matmul, "_CPU_HAS_BF16", False)
    monkeypatch.setattr(_matmul, "UPCAST_BYTES", 4 * 200 * 10)
    a, b = torch.randn(30, 200).to(dtype), torch.randn(200, 96).to(dtype)
    assert rel_l2(matmul(a, b), a.double() @ b.double()) <= 1e-6


def test_what_counts_as_plain():
    t = torch.randn(3)
    assert is_plain(t) and is_plain(torch.nn.Parameter(t))
    assert not is_plain(t.to("meta"))
    seen = []
    torch.func.vmap(lambda v: seen.append(is_plain(v)) or v)(t)
    torch.func.grad(lambda v: seen.append(is_plain(v)) or v.sum())(t)
    assert seen == [False, False]
    assert torch.equal(torch.compile(lambda v: v * 0 + is_plain(v), backend="eager", fullgraph=True)(t), torch.zeros(3))
