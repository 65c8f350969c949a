"""The recipe, and a runner that follows it; both sides of the comparison are such runners and differ in nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demo.batches import Batch
from demo.model import embed


@dataclass(frozen=True)
class Settings:
    steps: int = 100
    batch_size: int = 32
    max_tokens: int = 32
    r: int = 8
    alpha: float = 16.0
    lr: float = 3e-3
    """Of the adapters; falls to 0 along a line."""
    head_lr: float = 1e-2
    weight_decay: float = 0.01
    eps: float = 1e-6
    """Of AdamW. The usual 1e-8 would blow rounding differences in tiny gradients up to whole steps."""
    seed: int = 0

    @property
    def s(self) -> float:
        return self.alpha / self.r


@dataclass
class Runner:
    name: str
    model: nn.Module
    adapters: list[Tensor]
    head: nn.Linear
    settings: Settings
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe = self.settings
        self.optimizer = torch.optim.AdamW(
            [{"params": self.adapters, "lr": recipe.lr}, {"params": list(self.head.parameters()), "lr": recipe.head_lr}],
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, recipe.steps)

    def trained(self) -> int:
        """How many numbers are trained, those of the head included."""
        return sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])

    def loss(self, batch: Batch) -> Tensor:
        return cross_entropy(self.head(embed(self.model, batch.tokens)), batch.labels)

    def step(self, batch: Batch) -> float:
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()

    def dry_step(self, batch: Batch) -> None:
        """A step's forward and backward that leaves no trace, for measuring what it holds."""
        self.loss(batch).backward()
        self.optimizer.zero_grad()
