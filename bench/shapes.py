"""Whole layers on shapes drawn at random, where no table and no fit can have seen them."""

from __future__ import annotations

import math
from random import Random

# K x N of linears: Qwen3 0.6B to 32B, Llama 1B to 70B, Gemma 3, Phi 4, Mistral, ViT-g/14
MODELS = (
    (1024, 3072), (3072, 1024), (2048, 1024), (1024, 2048), (2048, 6144), (6144, 2048), (2048, 2048), (2560, 9728), (9728, 2560),
    (2560, 4096), (4096, 2560), (2560, 1024), (4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096), (4096, 14336), (14336, 4096),
    (5120, 5120), (5120, 1024), (5120, 25600), (25600, 5120), (2048, 8192), (8192, 2048), (3072, 8192), (8192, 3072), (8192, 8192),
    (8192, 1024), (8192, 28672), (28672, 8192), (3840, 15360), (15360, 3840), (5120, 17920), (17920, 5120), (1536, 4608),
    (1536, 6144), (1536, 1536), (5120, 7680), (1152, 4304), (768, 3072), (3072, 768), (1280, 5120), (5120, 1280), (4096, 11008),
)  # fmt: skip
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
