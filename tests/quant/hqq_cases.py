"""Against hqq: bit for bit what it dequantises. Run by test_hqq.py in a process of its own."""

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

from fdora.quant import from_hqq
from tests import device


@pytest.mark.parametrize("view_as_float", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_of_the_library(bits, axis, dtype, view_as_float):
    W = torch.randn(6, 128, device=device.NAME)
    made = {"nbits": bits, "group_size": 32, "axis": axis, "compute_dtype": dtype, "view_as_float": view_as_float}
    codes, meta = Quantizer.quantize(W, device=device.NAME, optimize=False, **made)
    codes, meta = Quantizer.to_inplace(codes, meta | {"compute_dtype": dtype}, device=device.NAME)
    q, want = from_hqq(codes, meta), Quantizer.dequantize(codes, meta)
    assert (q.kind, q.shape, q.dtype, q.facts) == ("hqq", (6, 128), dtype, (bits, axis, 32, dtype))
    assert want.dtype == dtype and torch.equal(q.dequantize(), want)
    assert q.tensors[0].data_ptr() == codes.data_ptr()
    assert torch.equal(q.dequantize(rows=slice(1, 5)), want[1:5])


def test_a_layer_of_the_library():
    linear = torch.nn.Linear(64, 6)
    layer = HQQLinear(linear, BaseQuantizeConfig(nbits=4, group_size=32), compute_dtype=torch.bfloat16, device=device.NAME)
    assert torch.equal(from_hqq(layer).dequantize(), layer.dequantize())
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in from_hqq(layer).tensors)
