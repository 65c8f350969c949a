"""DINOv2's ViT-g/14 from timm's configuration, with random weights: the names and the forwards are timm's, not its code.

``vit_giant_patch14_dinov2``: patches of 14 x 14, width 1536, 40 blocks, 24 heads, packed SwiGLU with 2 x 4096 hidden features,
LayerScale that starts at 1e-5, a class token, a bias in every layer. 224 x 224 pixels give 257 tokens.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sizes(NamedTuple):
    width: int = 1536
    heads: int = 24
    hidden: int = 4096
    """Of gate, and of up."""
    pixels: int = 224
    patch: int = 14


GIANT = Sizes()
TINY = Sizes(width=64, heads=4, hidden=96, pixels=28)
LINEARS = ("qkv", "proj", "fc1", "fc2")


class LayerScale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inplace = False
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Attention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj, self.proj_drop = nn.Linear(sizes.width, sizes.width), nn.Dropout(0.0)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(B, T, -1)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class GluMlp(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.chunk_dim, self.gate_last = -1, False
        self.fc1, self.act, self.drop1 = nn.Linear(sizes.width, 2 * sizes.hidden), nn.SiLU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(sizes.hidden, sizes.width), nn.Dropout(0.0)

    def forward(self, x):
        x = self.fc1(x)
        x1, x2 = x.chunk(2, dim=self.chunk_dim)
        x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(sizes.width, eps=1e-6), Attention(sizes)
        self.ls1, self.drop_path1 = LayerScale(sizes.width), nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(sizes.width, eps=1e-6), GluMlp(sizes)
        self.ls2, self.drop_path2 = LayerScale(sizes.width), nn.Identity()

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x


class Vit(nn.Module):
    def __init__(self, sizes: Sizes, layers: int):
        super().__init__()
        tokens = (sizes.pixels // sizes.patch) ** 2 + 1
        self.patch_embed = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
        self.pos_embed = nn.Parameter(torch.randn(1, tokens, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.width, eps=1e-6)

    def embed(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).mT
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


@torch.no_grad()
def vit(sizes: Sizes, layers: int, device: str, dtype: torch.dtype) -> Vit:
    """Frozen; biases and LayerScale are not those of a start, so that folding one wrongly shows."""
    with torch.device(device):
        model = Vit(sizes, layers)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.02)
            elif name.endswith("gamma"):
                p.copy_(0.1 * (1 + 0.3 * torch.randn_like(p)))
    return model.to(dtype).requires_grad_(False)


@torch.no_grad()
def fold_scale(model: Vit) -> Vit:
    """A copy whose LayerScale is in the weights of the linear before it, as the post "How does torch.compile speed up a
    transformer?" does by hand."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for linear, scale in ((block.attn.proj, "ls1"), (block.mlp.fc2, "ls2")):
            by = getattr(block, scale).gamma
            linear.weight.mul_(by[:, None])
            linear.bias.mul_(by)
            setattr(block, scale, nn.Identity())
    return model
