"""The norms of many layers, one after the other: fdora/eager/norm.py for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdora._records import NormOf, Norms
from fdora.eager._fingerprint import fingerprint
from fdora.eager.norm import default_bytes, norm_fwd

WORDS = 16  # of the 256 that one norm has the last are all zero


class TreeLayers:
    """Some layers, all on one device. ``at`` is where the c of each begins."""

    def __init__(self, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], s: Sequence[float], at: Sequence[int]):
        self.s, self.at = tuple(s), tuple(at)

    def norms(self, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], c: Tensor) -> None:
        """Writes all norms into c."""
        for w, a, b, s, i in zip(W, A, B, self.s, self.at, strict=True):
            c[i : i + w.shape[0]] = norm_fwd(NormOf(w.detach(), a.detach(), b.detach(), s))

    def guarded(self, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], old: Norms, new: Norms) -> None:
        """Writes new, which may be old: norms of before where the bits of A, B and s are."""
        for j, (w, a, b, s, i) in enumerate(zip(W, A, B, self.s, self.at, strict=True)):
            of, part = NormOf(w.detach(), a.detach(), b.detach(), s), slice(i, i + w.shape[0])
            now = fingerprint(of.A, of.B, s, default_bytes(w.device))[:WORDS]
            if w.device.type == "cpu":
                new.c[part] = old.c[part] if torch.equal(now, old.words[j]) else norm_fwd(of)
            else:  # reading a value would wait for the device
                new.c[part] = torch.where((now == old.words[j]).all(), old.c[part], norm_fwd(of))
            new.words[j] = now
