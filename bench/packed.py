"""A dense W in 4 bits as checkpoints of HQQ, GPTQ and AWQ have it, rounded to nearest between the ends of each group; and all
linears of a model as bitsandbytes packs them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fdora.quant import QuantWeight, from_awq, from_gptq, from_hqq

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight rows, in a word


def codes_of(W: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, K), and zeros and scales (N, K / group): W is near (q - zero) scale."""
    w = W.float().view(len(W), -1, group)
    low, high = w.aminmax(dim=2)
    scale = ((high - low) / 15).half().float().clamp_min(1e-6)
    zero = (-low / scale).round().clamp(0, 15)
    q = (w / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return q.view(W.shape).int(), zero, scale


def words(t: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes along ``dim`` to a word of 32 bits, from the low end in this order."""
    parts = t.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    total = sum(parts[..., at] << 4 * place for place, at in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int().contiguous()


def hqq(W: Tensor) -> QuantWeight:
    q, zero, scale = codes_of(W, 64)
    half = len(W) // 2
    meta = {"shape": tuple(W.shape), "axis": 1, "group_size": 64, "packing": "4bit_u8", "compute_dtype": W.dtype}
    meta |= {"scale": scale.to(W.dtype).view(-1, 1), "zero": zero.to(W.dtype).view(-1, 1)}
    return from_hqq((q[:half] << 4 | q[half:]).to(torch.uint8).view(-1, 64), meta)


def gptq(W: Tensor) -> QuantWeight:
    q, zero, scale = codes_of(W, 128)
    return from_gptq(words(q.T, 0), words(zero.T, 1), scale.T.half().contiguous(), version=2, dtype=W.dtype)


def awq(W: Tensor) -> QuantWeight:
    q, zero, scale = codes_of(W, 128)
    packed = (words(t.T, 1, AWQ_ORDER) for t in (q, zero))
    return from_awq(*packed, scale.T.half().contiguous(), dtype=W.dtype)


FORMATS = {"hqq": hqq, "gptq": gptq, "awq": awq}


def nf4_linears(model: nn.Module) -> None:
    """Every linear becomes a Linear4bit in NF4 with nested scales."""
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        device, W = layer.weight.device, layer.weight.detach().cpu()
        made = bnb.nn.Linear4bit(W.shape[1], W.shape[0], False, W.dtype, True, "nf4", device="meta")
        made.weight = bnb.nn.Params4bit(W, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
        made.quant_state = made.weight.quant_state
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
