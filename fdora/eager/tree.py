"""The norms of many layers, one after the other: fdora/eager/norm.py for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdora.eager._fingerprint import fingerprint
from fdora.eager.norm import default_bytes, norm_fwd

WORDS = 16  # of the 256 that one norm has the last are all zero


class Layers:
    """Some layers, all on one device. ``at`` is where the c of each begins."""

    def __init__(self, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], s: Sequence[float], at: Sequence[int]):
        self.s, self.at = tuple(s), tuple(at)

    def norms(self, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], c: Tensor) -> None:
        """Writes all norms into c."""
        for w, a, b, s, i in zip(W, A, B, self.s, self.at, strict=True):
            c[i : i + w.shape[0]] = norm_fwd(w.detach(), a.detach(), b.detach(), None, s, None)

    def guarded(
        self,
        W: Sequence[Tensor],
        A: Sequence[Tensor],
        B: Sequence[Tensor],
        old: Tensor,
        old_words: Tensor,
        new: Tensor,
        new_words: Tensor,
    ) -> None:
        """Writes new and new_words, which may be old and old_words: norms of before where the bits of A, B and s are."""
        for j, (w, a, b, s, i) in enumerate(zip(W, A, B, self.s, self.at, strict=True)):
            a, b, part = a.detach(), b.detach(), slice(i, i + w.shape[0])
            now = fingerprint(a, b, s, default_bytes(w.device))[:WORDS]
            if w.device.type == "cpu":
                new[part] = old[part] if torch.equal(now, old_words[j]) else norm_fwd(w.detach(), a, b, None, s, None)
            else:  # reading a value would wait for the device
                new[part] = torch.where((now == old_words[j]).all(), old[part], norm_fwd(w.detach(), a, b, None, s, None))
            new_words[j] = now
