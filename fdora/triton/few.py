"""Which of two ways few tokens take: one pass over W by narrow tiles (small.py), or the product of many tokens (product.py).

The first starts two kernels in the place of four or more, and reads W at the rate of memory while a program for each few
columns keeps enough bytes on their way. Each of them reads all of x, though, so 1 + M / BLOCK_N times the bytes of W come
through L2; and where columns are few (backward of a layer that widens) there are too few programs. Time in us, of the bytes

    max( W / memory + edge,  (1 + M / BLOCK_N) W / min( l2, programs min( of one, on their way / latency ) ) + waves edge )

The numbers are read off 30 measurements (h200/few.json: 5 weights, 1 to 32 tokens, both directions) and those of 64 tokens in
h200/shapes.json; they meet most within 15 %. The other way is that of choice.py, with the launches around it.
"""

from __future__ import annotations

from functools import lru_cache

from fdora.triton.choice import product_way
from fdora.triton.configs import power_of_two, small_config
from fdora.triton.runtime.device import cdiv
from fdora.triton.waves import Gpu, gpu_of

LIMIT = 64  # tokens; above, no narrow tile was written
MEMORY, L2 = 0.8, 1.45  # of the published bandwidth
OF_ONE = 70_000  # bytes a us that one multiprocessor takes in
LATENCY, EDGE = 1.7, 4.0  # us: of bytes on their way; of a program's start and end
RANK = 1.5  # us for 64 of the rank and 64 tokens
BESIDE = {True: 8.0, False: 11.0}  # us of the launches beside the product: h; dh, and dA, which the pass forms
SHARED = 227_000  # bytes of a multiprocessor


@lru_cache(4096)
def takes_narrow_tiles(M: int, N: int, K: int, r: int, trans_b: bool, tma: bool, capability: int, num_sms: int) -> bool:
    """(M, K) times (K, N). ``trans_b``: the columns of W are contiguous (forward)."""
    if M > LIMIT or not 90 <= capability < 100:  # other GPUs have other narrow tiles, which nobody has timed
        return M <= LIMIT
    way = product_way(M, N, K, r, trans_b, False, tma, capability, num_sms)
    return small_us(M, N, K, r, trans_b, gpu_of(capability, num_sms), capability) <= way.us + BESIDE[trans_b]


def small_us(M: int, N: int, K: int, r: int, trans_b: bool, gpu: Gpu, capability: int) -> float:
    rows = power_of_two(M)
    block_n, block_k, _, stages = small_config(rows, N, K, not trans_b, capability, gpu.num_sms)
    programs = cdiv(N, block_n)
    together = max(1, SHARED // (2 * stages * block_k * (rows + block_n)))
    on_their_way = 2 * (stages - 1) * block_k * (M + block_n)
    running = min(programs, gpu.num_sms * together)
    rate = min(L2 * gpu.bytes, min(running, gpu.num_sms) * OF_ONE, running * on_their_way / LATENCY)
    weight = 2 * N * K
    waves = cdiv(programs, gpu.num_sms * together)
    through_l2 = (1 + M / block_n) * weight / rate + waves * EDGE
    return max(weight / (MEMORY * gpu.bytes) + EDGE, through_l2) + RANK * r * M / 64**2
