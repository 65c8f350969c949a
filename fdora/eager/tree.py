"""The norms of many layers, one after the other: fdora/eager/norm.py for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from fdora._records import NormOf, Norms
from fdora.eager.norm import WORDS as WORDS_OF_ONE
from fdora.eager.norm import norm_fwd, norm_guarded

WORDS = 16  # of the 256 that one norm has the last are all zero


class OneByOne:
    """Some layers, all on one device, with what computes the norm of one. ``at`` is where the c of each begins."""

    def __init__(self, s: Sequence[float], at: Sequence[int], norm: Callable[..., Any], guarded: Callable[..., Any]):
        self.s, self.at, self.norm, self.norm_guarded = tuple(s), tuple(at), norm, guarded

    def norms(self, W: Sequence[Any], A: Sequence[Tensor], B: Sequence[Tensor], c: Tensor) -> None:
        """Writes all norms into c."""
        for of, part in self._each(W, A, B):
            c[part] = self.norm(of)

    def guarded(self, W: Sequence[Any], A: Sequence[Tensor], B: Sequence[Tensor], old: Norms, new: Norms) -> None:
        """Writes new, which may be old: norms of before where the bits of A, B and s are."""
        words = old.words.shape[1]
        for j, (of, part) in enumerate(self._each(W, A, B)):
            new.c[part], now = self.norm_guarded(of, old.c[part], pad(old.words[j], (0, WORDS_OF_ONE - words)))
            new.words[j] = now[:words]

    def _each(self, W: Sequence[Any], A: Sequence[Tensor], B: Sequence[Tensor]) -> Iterator[tuple[NormOf, slice]]:
        for w, a, b, s, i in zip(W, A, B, self.s, self.at, strict=True):
            yield NormOf(w.detach(), a.detach(), b.detach(), s), slice(i, i + w.shape[0])


class TreeLayers(OneByOne):
    """Dense ones."""

    def __init__(self, W: Sequence[Tensor], A: Sequence[Tensor], B: Sequence[Tensor], s: Sequence[float], at: Sequence[int]):
        super().__init__(s, at, norm_fwd, norm_guarded)
