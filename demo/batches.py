"""Texts to batches: tokens are counted once, and texts of a like length share a batch, so that little is padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from demo.data import Sample

POOL = 16
"""Batches that are sorted by length together when the order is drawn: random enough, and well packed."""


class Batch(NamedTuple):
    tokens: BatchEncoding
    labels: Tensor


class Texts:
    """The tokens and labels of one side of the split."""

    def __init__(self, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.ids = tokenizer([s.text for s in samples], truncation=True, max_length=max_tokens)["input_ids"]
        self.labels = torch.tensor([s.label for s in samples])
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], device: torch.device) -> Batch:
        tokens = self.tokenizer.pad({"input_ids": [self.ids[row] for row in rows]}, return_tensors="pt")
        return Batch(tokens.to(device), self.labels[list(rows)].to(device))

    def by_length(self) -> list[int]:
        """The rows, shortest texts first."""
        return sorted(range(len(self)), key=lambda row: len(self.ids[row]))

    def shuffled(self, size: int, generator: Generator) -> Iterator[list[int]]:
        """Batches without end: each pass sees a row at most once, in a new order."""
        while True:
            order = torch.randperm(len(self), generator=generator).tolist()
            batches = []
            for i in range(0, len(order), POOL * size):
                pool = sorted(order[i : i + POOL * size], key=lambda row: len(self.ids[row]))
                batches += [pool[j : j + size] for j in range(0, len(pool), size)]
            full = [rows for rows in batches if len(rows) == size] or batches
            yield from (full[i] for i in torch.randperm(len(full), generator=generator).tolist())
