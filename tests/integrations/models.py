"""Tiny PEFT models, one per kind of layer, with adapters that have moved."""

import copy
import warnings

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as lora
from torch import nn
from transformers.pytorch_utils import Conv1D

from fdora.integrations.peft import report
from tests.close import assert_exact

N, K = 40, 24


class Quantised(nn.Linear):
    """An int8 weight behind the interface that PEFT's helper knows from HQQ: W_q and dequantize()."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        with torch.no_grad():
            scale = self.weight.abs().amax(1, keepdim=True) / 127
            self.W_q = nn.Parameter((self.weight / scale).round().to(torch.int8), requires_grad=False)
            self.register_buffer("scale", scale)
            self.weight.zero_()  # whoever reads it is wrong

    def dequantize(self):
        return self.W_q.to(self.scale.dtype) * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)


def old_peft():
    """Before 0.19 unmerging a DoRA Conv1D raised, and half-precision adapters stayed so unless asked."""
    return not hasattr(lora.LoraLayer, "lora_variants")


class Scaled(nn.Embedding):
    """Gemma's embedding."""

    def __init__(self, num_embeddings, embedding_dim):
        super().__init__(num_embeddings, embedding_dim)
        self.register_buffer("embed_scale", torch.tensor(3.0), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.embed_scale.to(self.weight.dtype)


KINDS = {
    "linear": (lambda: nn.Linear(K, N), (3, 5, K)),
    "no_bias": (lambda: nn.Linear(K, N, bias=False), (7, K)),
    "Conv1D": (lambda: Conv1D(N, K), (3, 5, K)),
    "quantised": (lambda: Quantised(K, N), (3, 5, K)),
    "embedding": (lambda: nn.Embedding(K, N), None),
    "scaled": (lambda: Scaled(K, N), None),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, bias=False), (2, 4, 7, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2), (2, 2, 4, 3, 5)),
}
FUSED = ("linear", "no_bias", "embedding", "conv1d", "conv2d", "conv3d")
# More of those that are one call: what PEFT's numbers are compared on, and nothing else.
MORE = {
    "conv1d same": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
    "conv1d strided": (lambda: nn.Conv1d(4, 6, 5, stride=2, padding=2, bias=False), (2, 4, 9)),
    "conv2d padded": (lambda: nn.Conv2d(4, 6, (3, 2), padding=(1, 0), stride=(2, 1)), (2, 4, 7, 6)),
    "conv2d of one point": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 7, 6)),
    "conv3d padded": (lambda: nn.Conv3d(4, 6, (1, 3, 2), padding=(0, 1, 1)), (2, 4, 4, 5, 3)),
}


def perturb(model, spread=0.05):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                p.normal_(std=0.1)
            if "lora_magnitude" in name:
                p.mul_(1 + spread * torch.randn_like(p))
    return model


def inputs(kind, dtype=torch.float64):
    shape = (KINDS | MORE)[kind][1]
    return torch.randint(0, K, (3, 5)) if shape is None else torch.randn(shape, dtype=dtype, requires_grad=True)


def build(kind, dtype=torch.float64, dropout=0.0, use_dora=True, **config):
    """A PEFT model whose only layer is ``model.base_model.model[0]``: one of a kind, or this one."""
    base = nn.Sequential(kind if isinstance(kind, nn.Module) else (KINDS | MORE)[kind][0]()).to(dtype)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["0"], "fan_in_fan_out": kind == "Conv1D"} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it cannot merge groups
        return perturb(get_peft_model(base, LoraConfig(use_dora=use_dora, lora_dropout=dropout, **config)))


def layer(model):
    return model.base_model.model[0]


def path(model):
    """How its layer ran."""
    (row,) = report(model)
    return "fused" if row.fused else "composed" if row.composed else "stock"


def run(model, x, seed=0, f=None):
    """y and all gradients, of a random projection of y; float parameters and x. ``f``: what gives y in the model's place."""
    model.zero_grad()
    torch.manual_seed(seed)
    y = (f or model)(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if x.is_floating_point():
        leaves["x"] = x
    got = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    return {"y": y.detach()} | {n: g for n, g in zip(leaves, got, strict=True) if g is not None}


def same(got, want, what=""):
    assert got.keys() == want.keys()
    for name in want:
        assert_exact(got[name], want[name], f"{what} {name}")


def twin(model):
    return copy.deepcopy(model)
