"""Whether A, B and s are bit for bit what they were: decided on the GPU, so that no host waits for it.

A word is the wrapping sum of a bijection of each 64 bits and their position (splitmix64's finaliser): integers add in any
order, any change inside one element changes the sum for certain, any other change but for one chance in 2^64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora.triton.kernels.hash import hash_kernel
from fdora.triton.runtime import Array, Builder, Scalar, cdiv, named

WORDS = 256  # as in fdora/eager/_fingerprint.py: the first names the kind and s, each other belongs to a program
BLOCK = 2048
KIND = 1  # the eager backend has another: its words never match these


class Guard(NamedTuple):
    """A norm of before, the fingerprint it belongs to, and that of now: kernels return at once where the two agree."""

    c: Any = None
    old_hash: Array | None = None
    new_hash: Array | None = None
    KEEP: bool = False  # the norm of now takes the place of c
    WORDS: int = WORDS

    def rows(self, begin: int, end: int) -> Guard:
        return self if self.c is None else self._replace(c=self.c.rows(begin, end))


UNGUARDED = Guard()
_BITS = {2: torch.int16, 4: torch.int32}


def fingerprint(plan: Builder, A: Array, B: Array, s: Scalar, out: Array) -> None:
    """``out`` (WORDS,) int64 of the bits of A, B and s (as the float32 that the norm multiplies with); the first is never 0."""
    (a, packed_a), (b, packed_b) = _words(A), _words(B)
    kind = KIND + 16 * A.itemsize + 256 * B.itemsize
    programs = min(WORDS - 1, cdiv(max(a.numel, b.numel, 1), BLOCK))
    sizes = [(1, 1) if packed else (t.shape[1], t.stride[0]) for t, packed in ((a, packed_a), (b, packed_b))]
    given = {
        "A": a,
        "B": b,
        "out": out,
        "s": s,
        **named("count_a count_b PACKED_A PACKED_B", (a.numel, b.numel, packed_a, packed_b)),
    }
    given |= named("cols_a stride_ar cols_b stride_bn", sum(sizes, ()))  # where packed nobody reads them
    given |= {"BLOCK": BLOCK, "KIND": kind, "WORDS": WORDS, "PDL": plan.pdl}
    plan.launch(hash_kernel, (programs,), given, num_warps=16)


def _words(t: Array) -> tuple[Array, bool]:
    """As 64-bit words where memory allows it, else one word for each element."""
    dense = t.stride == (t.shape[1], 1) or t.numel <= 1
    if dense and t.aligned and t.nbytes % 8 == 0:
        return t.words((t.nbytes // 8,), (1,), torch.int64), True
    return t.words(t.shape, t.stride, _BITS[t.itemsize]), False
