"""A dense W in 4 bits as checkpoints of HQQ, GPTQ and AWQ have it, rounded to nearest between the ends of each group; and in
NF4 as bitsandbytes packs it: one layer beside its rivals, and all linears of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.ways import Inputs, S, Way, build, trained
from fdora.functional import dora_norm
from fdora.quant import QuantWeight, from_awq, from_bnb, from_gptq, from_hqq

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


BASES = ("bf16", "nf4", *FORMATS)


def linear4bit(W: Tensor) -> nn.Module:
    """bitsandbytes' layer of this W, in NF4 with nested scales."""
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(W.shape[1], W.shape[0], False, W.dtype, True, "nf4", device="meta")
    made.weight = bnb.nn.Params4bit(W.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4").to(W.device)
    made.quant_state = made.weight.quant_state
    return made


def nf4_linears(model: nn.Module) -> None:
    """Every linear becomes one of bitsandbytes."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear4bit(layer.weight.detach()))


class Packed:
    """The inputs of a layer whose W is in one of `BASES`, as codes and as they are decoded."""

    def __init__(self, base: str, i: Inputs):
        self.layer = linear4bit(i.W) if base == "nf4" else None
        self.codes = FORMATS[base](i.W) if self.layer is None else from_bnb(self.layer.weight)
        norm = dora_norm(self.codes, i.A, i.B, s=S, backend="eager").detach()
        m = (norm * (1 + 0.0015 * torch.randn_like(norm))).to(i.m.dtype).requires_grad_()
        self.i = i._replace(W=self.codes.dequantize(i.W.dtype), m=m, norm=norm)

    def way(self, name: str, rival_path: Sequence[Path], autocast: bool) -> Way:
        """fdora takes the codes, rivals what bitsandbytes packed, and whoever can do neither W as it is decoded."""
        W, state = self.i.W, None
        if name == "linear4bit":
            if self.layer is None:
                raise NotImplementedError("bitsandbytes has no such codes")
            return trained(self.layer, self.i, {}, "frozen")
        if name.startswith("fdora"):
            W = self.codes
        elif self.layer is not None and name.startswith("peft"):
            W = self.layer
        elif self.layer is not None and name.startswith(("unsloth", "axolotl")):
            if name.startswith("axolotl_dora") and self.i.A.shape[0] > 128:
                # It holds A's rows, padded to 512, by 2048 columns in registers: at r = 384 Triton took over 4 minutes.
                raise NotImplementedError("its kernel of the norm does not compile in minutes above r = 128")
            W, state = self.layer.weight.data, self.layer.quant_state
        return build(name, self.i._replace(W=W), rival_path, autocast, state)
