"""What from_hqq reads and refuses; against hqq itself in hqq_cases.py."""

from pathlib import Path

import pytest
import torch

from fdora._check import FdoraError
from fdora.functional import dora_linear
from fdora.quant import from_hqq
from tests.process import run_cases


def test_the_library():
    run_cases(Path(__file__).with_name("hqq_cases.py"), "hqq", 49)


class Layer:
    def __init__(self, W_q, meta):
        self.W_q, self.meta = W_q, meta


CODES = torch.zeros(4, 8, dtype=torch.uint8)
META = {"shape": (2, 32), "axis": 1, "group_size": 8, "packing": "4bit_u8", "scale": torch.ones(8, 1), "zero": torch.ones(8, 1)}


def test_what_was_made_in_inference_mode_is_kept_for_backward():
    """As HQQ makes all of it; autograd refuses such tensors."""
    with torch.inference_mode():
        codes, meta = CODES.clone(), META | {"scale": torch.ones(8, 1), "zero": torch.ones(8, 1)}
        assert from_hqq(codes, meta).shape == (2, 32)
    W = from_hqq(codes, meta)
    assert all(not t.is_inference() for t in W.tensors) and W.tensors[0].data_ptr() == codes.data_ptr()
    x, A, B, m = torch.randn(3, 32, requires_grad=True), torch.randn(4, 32), torch.randn(2, 4), torch.ones(2)
    dora_linear(x.half(), W.to(dtype=torch.float16), A, B, m, s=1.0).sum().backward()
    assert x.grad is not None


def test_without_a_group_a_row_or_a_column_is_one():
    whole = META | {"group_size": None, "scale": torch.ones(2, 1), "zero": torch.ones(2, 1)}
    assert from_hqq(torch.zeros(1, 32, dtype=torch.uint8), whole).facts[:3] == (4, 1, 32)
    assert from_hqq(Layer(CODES, META)).shape == (2, 32) and from_hqq(CODES, META).dtype == torch.float32
    assert from_hqq(CODES, META).facts == (4, 1, 8, torch.float16)


@pytest.mark.parametrize(
    ("codes", "meta", "says"),
    [
        (CODES, None, "`W_q` must be a tensor with its `meta`"),
        (object(), None, "a quantised HQQLinear"),
        (CODES, {k: v for k, v in META.items() if k != "axis"}, "a dictionary with axis"),
        (CODES, {k: v for k, v in META.items() if k != "scale"}, "a dictionary with scale.*quant_scale=False"),
        (CODES, META | {"packing": "3bit_32"}, "one of 8bit_u8, 4bit_u8.*got '3bit_32'"),
        (CODES, META | {"packing": None}, "got None"),
        (CODES, META | {"axis": 2}, "0 or 1, got 2"),
        (CODES, META | {"shape": (2, 2, 16)}, r"\(N, K\)"),
        (CODES, META | {"shape": (2, 64)}, r"`W_q` must be of shape \(8, 8\), got \(4, 8\)"),
        (CODES, META | {"scale": torch.ones(())}, r"`meta\['scale'\]` must be of shape \(8, 1\)"),
        (CODES, META | {"zero": torch.ones(1, 8)}, r"`meta\['zero'\]` must be of shape \(8, 1\)"),
        (CODES.int(), META, "`W_q` must be uint8"),
        (CODES[:3], META | {"shape": (7, 8), "scale": torch.ones(7, 1), "zero": torch.ones(7, 1)}, "7 rows of 4 bits"),
    ],
)
def test_errors(codes, meta, says):
    with pytest.raises(FdoraError, match=says):
        from_hqq(codes, meta)
