"""Weights of any codes, in every form that kernels read, and what fdora.quant's decoders, which test_weight.py holds to loops in
float64, make of them."""

from typing import NamedTuple

import torch

from fdora.quant import Codes8, QuantWeight
from fdora.quant.gptq import Gptq
from fdora.quant.hqq import Hqq
from fdora.triton.codes import Coded, Ints, coded_of, tensors_of
from tests import device
from tests.triton.written import FP32, likes_of_codes

E4M3 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A weight of codes, and its values in float32."""

    coded: Coded
    tensors: tuple[torch.Tensor, ...]
    W: torch.Tensor


def of_weight(W):
    W = W.to(device.NAME)
    return Case(coded_of(W), tuple(tensors_of(W.tensors)), W.dequantize(FP32))


def case_of(form, N, K):
    return of_weight(weight_of(form, N, K))


def drawn(like, low=0, high=256):
    """Words, bytes from ``low`` on, codes that are no NaN, or scales near 0.02."""
    if like.dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, like.shape).int()
    if like.dtype.itemsize > 1:
        return (0.01 + 0.02 * torch.rand(like.shape)).to(like.dtype)
    codes = torch.randint(low, high, like.shape, dtype=torch.uint8)
    return codes.where((like.dtype != E4M3) | (codes & 127 != 127), 0).view(like.dtype)


def weight_of(form, N, K, dtype=FP32):
    """In the rows, blocks and groups that the decoder wants."""
    likes = likes_of_codes(Coded((N, K), form))
    kind, facts, exponents = "nf4", form, getattr(form, "scales", "") == "e8m0"
    around = (119, 124) if exponents else (0x28, 0x58) if likes[1].dtype == E4M3 else (0, 256)
    tensors = [drawn(likes[0]), drawn(likes[1], *around), *map(drawn, likes[2:])]
    if isinstance(form, Codes8):
        kind = "fp8"
        if form.scale == "block":
            tensors[1] = tensors[1].view(-1, -(-K // form.block[1]))
    elif not isinstance(form, Ints):
        if form.scales == "e4m3/global":
            tensors[2] = 1 / tensors[2]
        if form.layout == "row" and N:
            tensors[:2] = [t.view(N, -1) for t in tensors[:2]]
    elif form.code.startswith("hqq"):
        kind, facts = "hqq", Hqq(form.bits, 1, form.group, compute_of(form))
        tensors = [tensors[0].view(-1, form.group), tensors[1][:, None], 200 * tensors[2][:, None]]
    else:
        kind, _, plus = form.code.partition("+")
        facts = Gptq(form.bits, form.group, int(plus or 0))
        tensors[3:] = [torch.randint(len(tensors[1]), (K,)).int()] * form.indexed
    return QuantWeight(kind, tuple(tensors), (N, K), dtype, facts).to(device.NAME)


def compute_of(form):
    """In which dtype HQQ decodes."""
    return getattr(torch, form.code.partition(".")[2])
