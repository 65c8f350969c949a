"""What an operation multiplies and moves, one entry for each kernel, and how long that takes on a GPU.

    time = sum over kernels of  start + max(flops / rate, bytes / bandwidth)

RMSNorm and the rotation are torch's operations one by one, as transformers writes them: n elements, bytes of each

    RMSNorm   forward    6 8 4 8 6 4                  to float32, square, mean, times root, to bfloat16, times weight
              backward   4 6 8 12 4 4 8 8 12 12 6 6   the same back; the square's is three, and two gradients are added up
    rotation  forward    4 2 4 4 6                    times cos, -half, joined, times sin, sum
              backward   4 4 2 4 4 6 6

The layers are those of :mod:`fdora.predict`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fdora.predict import operations

E = 2  # bytes of an activation
Kind = Literal["product", "attention", "attention_backward"]


class Kernel(NamedTuple):
    """One of those that an operation starts."""

    flops: float
    bytes: float
    kind: Kind = "product"


class Work(NamedTuple):
    """``calls``: how many of its kernels fdora starts in one call, forward or backward."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    calls: int = 0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.forward + other.forward, self.backward + other.backward, self.calls + other.calls)


def passes(n: int, *bytes: int) -> tuple[Kernel, ...]:
    return tuple(Kernel(0, n * each) for each in bytes)


def rms_norm(n: int) -> Work:
    return Work(passes(n, 6, 8, 4, 8, 6, 4), passes(n, 4, 6, 8, 12, 4, 4, 8, 8, 12, 12, 6, 6))


def rotation(n: int) -> Work:
    return Work(passes(n, 4, 2, 4, 4, 6), passes(n, 4, 4, 2, 4, 4, 6, 6))


def attention(tokens: int, length: int, masked: bool, width: int, kv_width: int) -> Work:
    """Causal, a token sees half of its sequence; by a mask, of which nothing is left out, it is compared with all of it."""
    flops = 4 * tokens * (length if masked else length / 2) * width
    moved = E * tokens * 2 * (width + kv_width)
    return Work((Kernel(flops, moved, "attention"),), (Kernel(2.5 * flops, 2 * moved, "attention_backward"),))


def linear(M: int, N: int, K: int, r: int, dx: bool) -> Work:
    """``r``: 0 for a frozen layer. ``dx``: whether the gradient of x is asked for."""
    if not r:
        one = Kernel(2 * M * N * K, E * (M * K + N * K + M * N))
        return Work((one,), (one,) if dx else ())
    _, _, forward, backward, _, _ = operations(M, N, K, r)
    back = [Kernel(f, E * n) for f, n in backward]
    return Work(tuple(Kernel(f, E * n) for f, n in forward), tuple(back if dx else back[:-1]), 1)


def decoding(N: int, K: int, stored: float) -> Work:
    """Of a quantised W, for forward and again for backward."""
    one = Kernel(0, N * K * (stored + E))
    return Work((one,), (one,))


class Profile(NamedTuple):
    """Measured rates per second, and seconds; see ``bench/profile_gpu.py``."""

    flops: float
    bytes: float
    start: float
    attention: float
    attention_backward: float
    norm16: float  # flops of the norms, of adapters of 16 and of 32 bits
    norm32: float
    host: float
    layer: float
    gather: float = 0.0  # 0: not measured
    send: float = 0.0

    def seconds(self, kernels: tuple[Kernel, ...]) -> float:
        rates = {"product": self.flops, "attention": self.attention, "attention_backward": self.attention_backward}
        return sum(self.start + max(each.flops / rates[each.kind], each.bytes / self.bytes) for each in kernels)
