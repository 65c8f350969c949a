"""What from_gptq and from_awq refuse, and that they say what they hold. Their values: test_weight.py."""

import pytest
import torch

from fdora._check import FdoraError
from fdora.quant import from_awq, from_gptq
from tests.quant.make import awq, gptq

Q, Z, S, G = torch.zeros(4, 24).int(), torch.zeros(2, 3).int(), torch.zeros(2, 24).half(), torch.zeros(32).int()
AQ, AZ, AS = torch.zeros(32, 3).int(), torch.zeros(4, 3).int(), torch.zeros(4, 24).half()


def test_facts():
    W = from_gptq(Q, Z, S, G)
    assert (W.kind, W.shape, W.dtype, W.facts) == ("gptq", (24, 32), torch.float16, (4, 16, 1))
    assert [t.data_ptr() for t in W.tensors] == [t.data_ptr() for t in (Q, Z, S, G)]
    assert from_gptq(Q, Z, S, version=2).facts == (4, 16, 0) and from_gptq(Q, Z, S).tensors[3] is None
    assert (
        list(W.named()) == ["qweight", "qzeros", "scales", "g_idx"]
        and from_gptq(Q, Z, S, dtype=torch.bfloat16).dtype == torch.bfloat16
    )
    W = from_awq(AQ, AZ, AS)
    assert (W.kind, W.shape, W.dtype, W.facts) == ("awq", (24, 32), torch.float16, (4, 8, 0))
    assert [t.data_ptr() for t in W.tensors] == [t.data_ptr() for t in (AQ, AZ, AS)]


@pytest.mark.parametrize("make", [gptq, awq])
def test_half_precision_is_one_rounding_of_the_exact_value(make):
    W, truth = make()
    assert torch.equal(W.dequantize(torch.float16), truth.half()) and torch.equal(W.dequantize(torch.float64), truth)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: from_gptq(Q, Z, S, bits=3), "`bits` must be 2, 4 or 8, got 3"),
        (lambda: from_gptq(Q, Z, S, version=0), "`version` must be 1 or 2"),
        (lambda: from_gptq(Q.long(), Z, S), "`qweight` must be int32"),
        (lambda: from_gptq(Q, Z, S[:, :-1].contiguous()), r"`scales` must be of shape \(2, 24\)"),
        (lambda: from_gptq(Q, Z[:, :-1].contiguous(), S), r"`qzeros` must be of shape \(2, 3\)"),
        (lambda: from_gptq(Q, Z, S, G[:-1]), r"`g_idx` must be of shape \(32,\)"),
        (lambda: from_gptq(Q, Z, S, G.float()), "`g_idx` must be int32 or int64"),
        (lambda: from_gptq(Q, Z, S, dtype=torch.int32), "`dtype`"),
        (lambda: from_gptq(Q[0], Z, S), r"\(N, K\)"),
        (lambda: from_awq(AQ, AZ, AS, 16), r"`scales` must be of shape \(2, 24\), got \(4, 24\)"),
        (lambda: from_awq(AQ, AZ[:3], AS), r"`qzeros` must be of shape \(4, 3\)"),
        (lambda: from_awq(AQ, AZ, AS[:, :8].contiguous()), "`scales`"),
        (lambda: from_awq(AQ.float(), AZ, AS), "`qweight` must be int32"),
    ],
)
def test_errors(call, says):
    with pytest.raises(FdoraError, match=says):
        call()
