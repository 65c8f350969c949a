"""fp8, MXFP4 and NVFP4: the ends and the shapes of their scales, and what their constructors refuse. Their values: test_weight.py."""

import pytest
import torch

from fdora._check import FdoraError
from fdora.quant import from_fp8, from_int8, from_mxfp4, from_nvfp4
from tests import device
from tests.quant.make import randint


def e4m3(*shape):
    return torch.randn(*shape, device=device.NAME).to(torch.float8_e4m3fn)


def test_fp8_scales_of_every_shape_and_dtype():
    codes = e4m3(6, 5)
    one = torch.tensor(0.5, device=device.NAME)
    for scale in (one, one[None], one[None, None], one.bfloat16(), one.to(torch.float8_e8m0fnu)):
        q = from_fp8(codes, scale, dtype=torch.float32)
        assert torch.equal(q.dequantize(), codes.float() / 2) and q.facts == ("e4m3", "tensor", (0, 0), 1.0, False)
        assert q.tensors[1].shape == (1,) and q.tensors[1].dtype == torch.float32
    rows = torch.rand(6, device=device.NAME)
    for scale in (rows, rows[:, None]):
        q = from_fp8(codes, scale, "row", dtype=torch.float32)
        assert torch.equal(q.dequantize(), codes.float() * rows[:, None]) and q.tensors[1].shape == (6,)
        assert q.tensors[1].data_ptr() == rows.data_ptr()


def test_every_exponent_of_e8m0():
    codes = torch.full((256, 16), 0x22, dtype=torch.uint8, device=device.NAME)  # ones
    scales = torch.arange(256, device=device.NAME).to(torch.uint8)[:, None]
    D = from_mxfp4(codes, scales).dequantize(torch.float64)[:, 0]
    assert D[:255].tolist() == [2.0 ** (i - 127) for i in range(255)] and D[255].isnan()
    same = from_mxfp4(codes, scales.view(torch.float8_e8m0fnu))
    assert torch.equal(same.dequantize(torch.float64)[:255, 0], D[:255]) and same.tensors[1].dtype == torch.uint8


def test_nvfp4_global_scale():
    codes, scales = randint(4, 24), torch.full((4, 3), 2.0, device=device.NAME).to(torch.float8_e4m3fn)
    plain = from_nvfp4(codes, scales, dtype=torch.float32)
    for whole in (torch.tensor(0.25, device=device.NAME), torch.tensor([0.25], device=device.NAME)):
        times, over = (from_nvfp4(codes, scales, whole, divide, dtype=torch.float32) for divide in (False, True))
        assert torch.equal(times.dequantize(), plain.dequantize() / 4) and torch.equal(
            over.dequantize(), plain.dequantize() * 4
        )
        assert times.facts == ("e2m1", False, 16, "e4m3*global", "row") and over.facts.scales == "e4m3/global"
        assert list(times.named()) == ["codes", "scales", "global"] and times.tensors[2].shape == ()
        assert times.tensors[2].data_ptr() == whole.data_ptr()


def test_the_dtype_of_two_codes():
    codes = randint(4, 16)
    q = from_mxfp4(codes.view(torch.float4_e2m1fn_x2), randint(4, 1))
    assert q.tensors[0].dtype == torch.uint8 and torch.equal(q.tensors[0], codes)


CODES, SCALES = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
E4, S4 = torch.zeros(4, 16).to(torch.float8_e4m3fn), torch.zeros(4, 2).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: from_fp8(E4.to(torch.float8_e5m2), torch.ones(1)), "`weight` must be float8_e4m3fn, got float8_e5m2"),
        (
            lambda: from_fp8(E4, torch.ones(2)),
            r"`scale` must be of shape \(\) or \(1,\) or \(1, 1\) with block=None, got \(2,\)",
        ),
        (lambda: from_fp8(E4, torch.ones(16), "row"), r"must be of shape \(4,\) or \(4, 1\)"),
        (lambda: from_fp8(E4, torch.ones(1, 2), (128, 128)), r"must be of shape \(1, 1\) with block=\(128, 128\)"),
        (lambda: from_fp8(E4, torch.ones(1), "tensor"), r"`block` must be None, 'row' or \(bn, bk\), got 'tensor'"),
        (lambda: from_fp8(E4, torch.ones(1), (0, 128)), "`block`"),
        (lambda: from_fp8(E4, torch.ones(1).int()), "`scale` must be float32"),
        (lambda: from_fp8(E4, torch.ones(1), dtype=torch.int8), "`dtype` must be a floating"),
        (lambda: from_fp8(E4[None, None], torch.ones(1)), r"must be \(N, K\)"),
        (lambda: from_fp8(E4.T, torch.ones(1)), "`weight` must be contiguous"),
        (lambda: from_fp8([1], torch.ones(1)), "`weight` must be a torch.Tensor, got a list"),
        (lambda: from_int8(E4, torch.ones(4)), "`codes` must be int8"),
        (
            lambda: from_mxfp4(CODES[None].repeat(2, 1, 1), SCALES),
            r"\(N, K / 2\) or \(N, K / 32, 16\), got \(2, 4, 16\)|scales",
        ),
        (lambda: from_mxfp4(CODES.view(2, 2, 4, 4), SCALES), "of a stack of experts"),
        (lambda: from_mxfp4(CODES, SCALES.repeat(1, 2)), r"`scales` must be of shape \(4, 1\), got \(4, 2\)"),
        (lambda: from_mxfp4(CODES, SCALES.float()), "`scales` must be uint8 or float8_e8m0fnu"),
        (lambda: from_nvfp4(CODES, SCALES), "`scales` must be float8_e4m3fn"),
        (lambda: from_nvfp4(CODES, S4, torch.ones(2)), "`global_scale` must be one number"),
        (lambda: from_nvfp4(CODES, S4, 0.5), "`global_scale` must be a torch.Tensor, got a float"),
        (lambda: from_nvfp4(CODES, S4, dtype=None), "`dtype` must be a floating"),
    ],
)
def test_errors(call, says):
    with pytest.raises(FdoraError, match=says):
        call()
