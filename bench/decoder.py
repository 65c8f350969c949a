"""Decoder layers in the shape of Qwen3-8B, random and frozen: RMSNorm, grouped heads with q and k norm, rotary, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Sizes:
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    intermediate: int = 12288


class Layer(nn.Module):
    def __init__(self, z: Sizes):
        super().__init__()
        self.z = z
        self.norm_1, self.norm_2 = (nn.RMSNorm(z.hidden, 1e-6) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(z.head, 1e-6) for _ in range(2))
        self.q_proj = nn.Linear(z.hidden, z.heads * z.head, bias=False)
        self.k_proj = nn.Linear(z.hidden, z.kv_heads * z.head, bias=False)
        self.v_proj = nn.Linear(z.hidden, z.kv_heads * z.head, bias=False)
        self.o_proj = nn.Linear(z.heads * z.head, z.hidden, bias=False)
        self.gate_proj = nn.Linear(z.hidden, z.intermediate, bias=False)
        self.up_proj = nn.Linear(z.hidden, z.intermediate, bias=False)
        self.down_proj = nn.Linear(z.intermediate, z.hidden, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, self.z.head))

        q = rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(x)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        h = self.norm_2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return t * cos + torch.cat((-b, a), -1) * sin


def angles(length: int, head: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    frequencies = 1e6 ** (-torch.arange(0, head, 2, device=device) / head)
    turns = torch.outer(torch.arange(length, device=device), frequencies).repeat(1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def decoder(layers: int, sizes: Sizes, dtype: torch.dtype, device: str) -> nn.ModuleList:
    with torch.device("meta"):
        model = nn.ModuleList(Layer(sizes) for _ in range(layers)).to(dtype)
    model.to_empty(device=device).requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.ones_(p) if p.ndim == 1 else torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return model
