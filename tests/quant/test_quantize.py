"""The reference quantisers: nearest codes, usual scales, ties, zeros, ragged ends."""

import math

import pytest
import torch

from fdora._check import FdoraError
from fdora.quant import TABLES, quantize
from fdora.quant.quantize import bounds_of, quantize_rows, to_e2m1
from tests import device
from tests.quant.make import E2M1, FP4, NF4

KINDS = [("nf4", {}), ("nf4", {"nested": True}), ("nf4", {"group": 256}), ("fp4", {}), ("fp4", {"nested": True}), ("mxfp4", {})]
KINDS += [
    ("nvfp4", {}),
    ("int8", {}),
    ("int8", {"block": None}),
    ("fp8", {}),
    ("fp8", {"block": None}),
    ("fp8", {"block": (128, 128)}),
]
# 1.25 times what the formats lose on normal numbers (research/quantized.md 4.1)
LIMIT = {"nf4": 0.115, "fp4": 0.153, "mxfp4": 0.143, "nvfp4": 0.119, "int8": 0.019, "fp8": 0.034}
every = pytest.mark.parametrize(("kind", "how"), KINDS, ids=str)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("N, K", [(200, 300), (1, 128), (65, 34)])
def test_close(kind, how, dtype, N, K):
    W = torch.randn(N, K, device=device.NAME).to(dtype)
    q = quantize(W, kind, **how)
    assert (q.kind, q.shape, q.dtype, q.device) == (kind, (N, K), dtype, W.device)
    wide = 1.35 if how.get("group") == 256 else 1.0
    assert (q.dequantize(torch.float64) - W.double()).norm() / W.double().norm() < LIMIT[kind] * wide
    assert quantize(W, kind, dtype=torch.bfloat16, **how).dtype == torch.bfloat16
    assert quantize(W.requires_grad_(), kind, **how).tensors[1].requires_grad is False


@every
def test_zeros_stay_zeros(kind, how):
    W = torch.randn(40, 128, device=device.NAME)
    W[3], W[4, :64] = 0, 0
    D = quantize(W, kind, **how).dequantize()
    assert D.isfinite().all()
    assert (D[3] == 0).all() and (D[4, :64] == 0).all()
    zeros = quantize(torch.zeros(3, 64, device=device.NAME), kind, **how)
    assert (zeros.dequantize() == 0).all() and (kind == "nf4" or (zeros.tensors[0].view(torch.uint8) == 0).all())


@every
def test_what_was_quantised_comes_back(kind, how):
    W = torch.randn(33, 128, device=device.NAME)
    once = quantize(W, kind, **how)
    if how.get("nested"):
        return  # its scales move a little each time
    twice = quantize(once.dequantize(), kind, **how).dequantize()
    torch.testing.assert_close(twice, once.dequantize(), rtol=1e-6, atol=0)


@every
@pytest.mark.parametrize("N, K", [(200, 300), (45, 98), (3, 10), (0, 64)])
def test_few_rows_at_a_time_are_all_of_them(kind, how, N, K, monkeypatch):
    W = torch.randn(N, K, device=device.NAME)
    whole, asked = quantize(W, kind, **how), []
    monkeypatch.setitem(bounds_of.__globals__, "CHUNK", 1000)
    parts = quantize_rows(lambda i, j: asked.append(j - i) or W[i:j], whole.spec, W.device)
    assert parts.spec == whole.spec and (
        len(asked) > 1 or N * K < 1000 or how.get("group") == 256 or how.get("block") == (128, 128)
    )
    for part, all_of_it in zip(parts.tensors, whole.tensors, strict=True):
        assert part.dtype == all_of_it.dtype and torch.equal(part.float().nan_to_num(), all_of_it.float().nan_to_num())


@pytest.mark.parametrize(("name", "want"), [("nf4", NF4), ("fp4", FP4), ("e2m1", E2M1)])
def test_tables(name, want):
    assert torch.equal(torch.tensor(TABLES[name]), torch.tensor(want, dtype=torch.float32))


def test_every_value_becomes_the_nearest_one():
    x = torch.linspace(-7, 7, 2801, device=device.NAME, dtype=torch.float64)
    got = [E2M1[c] for c in to_e2m1(x.float()).tolist()]
    for value, each in zip(x.tolist(), got, strict=True):
        assert abs(value - each) <= min(abs(value - v) for v in E2M1) + 1e-6


def test_ties_of_e2m1_go_to_the_even_code():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device.NAME)
    assert to_e2m1(middles).tolist() == [0, 2, 2, 4, 4, 6, 6] and to_e2m1(-middles).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert to_e2m1(torch.tensor([0.0, -0.0, 100.0, -math.inf])).tolist() == [0, 8, 7, 15]


def test_scales():
    W = torch.zeros(2, 64, device=device.NAME)
    W[0, 0], W[1, 40] = 7.9, -0.1
    scales = quantize(W, "mxfp4").tensors[1].tolist()
    assert scales == [[127, 0], [0, 127 - 4 - 2]]  # floor(log2(7.9)) = 2, floor(log2(0.1)) = -4, less 2
    _, s, whole = quantize(W, "nvfp4").tensors
    assert whole.item() == pytest.approx(7.9 / 448 / 6) and s.float()[0, 0] == 448 and s.float()[1, 2] == 5.5
    assert quantize(W, "int8").tensors[1].tolist() == pytest.approx([7.9 / 127, 0.1 / 127])
    assert quantize(W, "fp8", block=None).tensors[1].tolist() == pytest.approx([7.9 / 448])
    assert quantize(W, "fp8", block=(1, 32)).tensors[1].shape == (2, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda W: quantize(W, "int3"), "`kind` must be nf4, fp4, mxfp4, nvfp4, int8 or fp8, got 'int3'"),
        (lambda W: quantize(W, "gptq"), "made by their own libraries"),
        (lambda W: quantize(W.int(), "nf4"), "`W` must be float16"),
        (lambda W: quantize(W[0], "nf4"), r"\(N, K\)"),
        (lambda W: quantize(W, "nf4", group=33), "`group` must be an even int"),
        (lambda W: quantize(W, "nf4", group=64.0), "`group` must be an even int of at least 2, got 64.0"),
        (lambda W: quantize(W, "nf4", dtype=torch.int8), "`dtype` must be a floating dtype of torch, got torch.int8"),
        (lambda W: quantize(quantize(W, "nf4"), "nf4"), "`W` must be a dense torch.Tensor, got a QuantWeight"),
        (lambda W: quantize(W.tolist(), "nf4"), "`W` must be a dense torch.Tensor, got a list"),
        (lambda W: quantize(W, "int8", group=64), "`group` must be None"),
        (lambda W: quantize(W, "mxfp4", nested=True), "nested False"),
        (lambda W: quantize(W, "nf4", block=None), "`block` must be left out"),
        (lambda W: quantize(W, "fp8", block="column"), "`block` must be None, 'row' or"),
        (lambda W: quantize(W, "mxfp4"), "of even K"),
    ],
)
def test_errors(call, says):
    with pytest.raises(FdoraError, match=says):
        call(torch.randn(4, 33))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("kind", "whole"), [("nf4", 1), ("fp4", 1), ("mxfp4", 1), ("int8", 1), ("fp8", 1), ("nvfp4", 6)])
def test_what_is_not_finite_never_becomes_finite(kind, whole, bad):
    """One row, where scales belong to parts of rows, or all (nvfp4 has one scale more for all of them)."""
    W = torch.randn(6, 64, device=device.NAME)
    W[2, 40] = bad
    lost = ~quantize(W, kind).dequantize().isfinite()
    assert lost[2, 40] and lost.any(1).sum() == whole
