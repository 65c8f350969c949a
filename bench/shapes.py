"""Shapes drawn at random, which no table and no fit has seen; and inputs in several places of memory, which no cache holds."""

from __future__ import annotations

import math
from random import Random

from bench import suite
from bench.ways import Inputs

CACHE = 2**28  # bytes: several times what any GPU keeps

# K x N of linears: Qwen3 0.6B to 32B, Llama 1B to 70B, Gemma 3, Phi 4, Mistral, ViT-g/14
MODELS = suite.shapes(
    "1024x3072,3072x1024,2048x1024,1024x2048,2048x6144,6144x2048,2048x2048,2560x9728,9728x2560,2560x4096,4096x2560,2560x1024,"
    "4096x4096,4096x1024,4096x12288,12288x4096,4096x14336,14336x4096,5120x5120,5120x1024,5120x25600,25600x5120,2048x8192,"
    "8192x2048,3072x8192,8192x3072,8192x8192,8192x1024,8192x28672,28672x8192,3840x15360,15360x3840,5120x17920,17920x5120,"
    "1536x4608,1536x6144,1536x1536,5120x7680,1152x4304,768x3072,3072x768,1280x5120,5120x1280,4096x11008"
)
RANKS = (4, 8, 12, 16, 16, 24, 32, 32, 48, 64, 64, 96, 128, 192, 256, 384, 512)
MOST = 2**28  # elements of W: no published layer has more


def draw(seed: int, count: int) -> list[tuple[int, int, int, int]]:
    """(M, K, N, r): 64 to 8192 tokens, half of them no multiple of anything; half of the weights are of models."""
    random, shapes = Random(seed), []
    while len(shapes) < count:
        M = round(math.exp(random.uniform(math.log(64), math.log(8192))))
        M = M if random.random() < 0.5 else max(64, M // 64 * 64)
        K, N = (128 * round(math.exp(random.uniform(math.log(6), math.log(224)))) for _ in range(2))
        K, N = random.choice(MODELS) if random.random() < 0.5 else (K, N)
        shape = (M, K, N, random.choice(RANKS))
        if K * N <= MOST and shape not in shapes:
            shapes.append(shape)
    return shapes


def copied(i: Inputs) -> Inputs:
    return Inputs(*(t.detach().clone().requires_grad_(t.requires_grad) for t in i))


def copies_of(i: Inputs) -> list[Inputs]:
    """It and as many copies as no cache holds, eight at most."""
    size = 2 * (i.x.numel() + i.W.numel() + 2 * i.dy.numel())
    return [i, *(copied(i) for _ in range(max(1, min(8, CACHE // size)) - 1))]
