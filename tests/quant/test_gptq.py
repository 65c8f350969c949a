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
    assert from_gptq(Q, Z, S, version=2).facts == (4, 16, 0) and len(from_gptq(Q, Z, S).tensors) == 3
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


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_of_0_borrow_in_version_1(bits):
    """gptqmodel makes version 1 of version 2 by one subtraction from each word, and undoes it by one addition."""
    N, per, mask = 48, 32 // bits, (1 << bits) - 1
    z = torch.randint(0, 1 << bits, (2, N)) * (torch.rand(2, N) < 0.6)  # z = 0 beside others, in any place of a word
    z[0, :per] = 0
    words = (z.view(2, -1, per) << bits * torch.arange(per)).sum(2)
    before = (words - sum(1 << bits * i for i in range(per))) & 0xFFFFFFFF
    v2, v1 = (torch.where(w >= 1 << 31, w - (1 << 32), w).int() for w in (words, before))
    qweight, scales = torch.randint(-(2**31), 2**31, (2 * bits, N)).int(), torch.rand(2, N).half()
    q = (qweight[:, None] >> bits * torch.arange(per)[:, None] & mask).flatten(0, 1)
    want = ((q - z.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)).T
    assert (z == 0).sum() > 20 and q.shape == (64, N)
    for zeros, version in ((v2, 2), (v1, 1)):
        W = from_gptq(qweight, zeros, scales, bits=bits, version=version)
        assert torch.equal(W.dequantize(torch.float32), want)
        assert torch.equal(W.dequantize(torch.float32, rows=slice(5, 41)), want[5:41])


def test_groups_of_unequal_length_are_not_guessed():
    """40 in_features in groups of 16: 3 groups, the last of 8, and not 14, 14 and 12."""
    g_idx, scales = torch.arange(40).int() // 16, torch.arange(1, 4)[:, None].expand(3, 8).contiguous().half()
    Q, Z = torch.full((5, 8), 0x11111111).int(), torch.zeros(3, 1).int()
    W = from_gptq(Q, Z, scales, g_idx, version=2)
    assert torch.equal(W.dequantize()[0], (g_idx + 1).half())
    A = torch.full((40, 1), 0x11111111).int()
    assert torch.equal(from_awq(A, Z, scales, 16).dequantize()[0], (g_idx + 1).half())
    with pytest.raises(FdoraError, match=r"`g_idx` must be given where 3 groups do not divide K=40, got None"):
        from_gptq(Q, Z, scales, version=2)
    with pytest.raises(FdoraError, match=r"`group` must be given where 3 groups do not divide K=40, got None"):
        from_awq(A, Z, scales)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: from_gptq(Q, Z, S, bits=3), "`bits` must be 2, 4 or 8, got 3"),
        (lambda: from_gptq(Q, Z, S, version=0), "`version` must be 1 or 2"),
        (lambda: from_gptq(Q.long(), Z, S), "`qweight` must be int32"),
        (lambda: from_gptq(Q, Z, S[:, :-1].contiguous()), r"`scales` must be of shape \(2, 24\)"),
        (lambda: from_gptq(Q, Z[:, :-1].contiguous(), S), r"`qzeros` must be of shape \(2, 3\)"),
        (lambda: from_gptq(Q, Z, S, G[:-1]), r"`g_idx` must be of shape \(32,\)"),
        (lambda: from_gptq(Q, Z, S, G + len(S)), r"`g_idx` must be groups from 0 to .*, the rows of scales, got values from"),
        (lambda: from_gptq(Q, Z, S, G - 1), r"`g_idx` must be groups from 0 to .*, the rows of scales, got values from -1 to"),
        (lambda: from_gptq(Q, Z, S, G.float()), "`g_idx` must be int32 or int64"),
        (lambda: from_gptq(Q, Z, S, dtype=torch.int32), "`dtype`"),
        (lambda: from_gptq(Q[0], Z, S), r"\(N, K\)"),
        (lambda: from_awq(AQ, AZ, AS, 16), r"`scales` must be of shape \(2, 24\), got \(4, 24\)"),
        (lambda: from_awq(AQ, AZ[:3], AS), r"`qzeros` must be of shape \(4, 3\)"),
        (lambda: from_awq(AQ, AZ, AS[:, :8].contiguous()), "`scales`"),
        (lambda: from_awq(AQ.float(), AZ, AS), "`qweight` must be int32"),
        (lambda: from_awq(AQ, AZ, AS, -1), "`group` must be an int of at least 1, got -1. For one group of all .* pass 32"),
    ],
)
def test_errors(call, says):
    with pytest.raises(FdoraError, match=says):
        call()
