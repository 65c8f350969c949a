"""Norms of QuantWeights by kernels: those of fdora.quant's own decoders, whatever the kind."""

import pytest
import torch

from fdora.functional import dora_merge_quantized, dora_norm, dora_norm_state
from fdora.quant import opaque
from tests import device, reference
from tests.checks.norm_state import moved
from tests.quant.make import QUANTISED
from tests.triton.marks import INTERPRETED, needs_kernels
from tests.triton.test_quant_layers import weight

pytestmark = needs_kernels
S = 0.7


def adapter(W, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    n, k = W.shape
    return [(torch.randn(shape, generator=g) / 8).to(device.NAME, dtype) for shape in ((4, k), (n, 4))]


@pytest.fixture
def launched(monkeypatch):
    """Names of the plans of codes that ran."""
    from fdora.triton.runtime import walk

    found, run = [], walk.run
    monkeypatch.setattr(
        walk, "run", lambda plan, *args: ("of codes" in plan.name and found.append(plan.name)) or run(plan, *args)
    )
    return found


def test_other_kinds_are_decoded_some_rows_at_a_time(launched):
    dense = torch.randn(48, 96, device=device.NAME, dtype=torch.float16)
    W = opaque(lambda t: t.mul(2), (48, 96), torch.float16, device.NAME, (dense,))
    A, B = adapter(W)
    want = reference.norm(2 * dense.double(), A.double(), B.double(), S)
    torch.testing.assert_close(dora_norm(W, A, B, s=S, backend="triton").double(), want, rtol=1e-6, atol=0)
    assert not launched


@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.float16) for n in QUANTISED), ("nf4 nested", torch.float32)], ids=str)
def test_a_state_is_decided_on_by_the_kernels(name, dtype, launched, monkeypatch):
    W = weight(name)
    A, B = adapter(W, dtype)
    state, seen = moved(W, A, B, dora_norm_state(W), "triton")
    assert seen and torch.equal(state.c, dora_norm(W, A, B, s=S, backend="triton"))
    with monkeypatch.context() as patch:
        if INTERPRETED:  # no tile is looked at
            from fdora.triton.kernels import quant as kernels

            patch.setattr(kernels, "product_of", None)
        assert not moved(W, A.clone(), B.clone(), state, "triton")[1]
    for change in (lambda: B[-1, -1].add_(1), lambda: A[0, 5].neg_()):
        change()
        state, seen = moved(W, A, B, state, "triton")
        assert seen
    assert moved(W, A, B, state, "triton", s=-S)[1]
    assert launched.count("dora_norm of codes where A, B or s changed") == 5


def test_a_state_of_another_kind():
    half = (torch.randn(48, 96, generator=torch.Generator().manual_seed(2)) / 8).to(device.NAME, torch.float16)
    W = opaque(lambda t: t.mul(2), (48, 96), torch.float16, device.NAME, (half,))
    A, B = adapter(W)
    state, seen = moved(W, A, B, dora_norm_state(W), "triton")
    assert seen and not moved(W, A, B, state, "triton")[1]
    B[0, 0] += 1
    assert moved(W, A, B, state, "triton")[1]


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_merge_in_the_format_of_its_weight(name):
    W = weight(name)
    A, B = adapter(W)
    m = 1.1 * reference.norm(W.dequantize(torch.float32).double(), A.double(), B.double(), S).float()
    merged, error = dora_merge_quantized(W, A, B, m, s=S, backend="triton")
    want, wanted = dora_merge_quantized(W, A, B, m, s=S, backend="eager")
    assert merged.spec == W.spec and merged.device == error.device == W.device
    torch.testing.assert_close(error, wanted, rtol=1e-2, atol=0)
    # a value at the middle of two codes may go to the other one
    same = torch.isclose(merged.dequantize(torch.float32), want.dequantize(torch.float32), rtol=1e-4, atol=1e-6)
    assert same.float().mean() > 0.99
