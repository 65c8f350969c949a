"""What the model gives without being changed: a linear head on its frozen embeddings."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from demo import stop
from demo.batches import Texts
from demo.model import embed

LR, WEIGHT_DECAY, STEPS = 3e-3, 1.0, 300
"""Full-batch AdamW. Of 16 recipes (rates 1e-3 to 3e-2, decays 0 to 1, up to 1,000 steps) the best on the held-out texts,
so the probe is not held back."""


@torch.no_grad()
def embed_all(model: nn.Module, texts: Texts, device: torch.device, name: str) -> Tensor:
    """The embedding of every text, in the order of ``texts``."""
    rows = texts.by_length()
    starts = stop.steps(tqdm(range(0, len(rows), 64), name, unit="batch"))
    vectors = torch.cat([embed(model, texts.batch(rows[i : i + 64], device).tokens) for i in starts])
    return torch.empty_like(vectors).index_copy_(0, torch.tensor(rows, device=device), vectors)


def train_probe(head: nn.Linear, vectors: Tensor, labels: Tensor) -> nn.Linear:
    """A copy of ``head``, trained on the vectors until it gains no more."""
    head = deepcopy(head)
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    bar = tqdm(range(STEPS), "training the linear probe", unit="step")
    for _ in stop.steps(bar):
        optimizer.zero_grad()
        loss = cross_entropy(head(vectors), labels)
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return head


@torch.no_grad()
def accuracy(head: nn.Linear, vectors: Tensor, labels: Tensor) -> float:
    return (head(vectors).argmax(1) == labels).double().mean().item()
