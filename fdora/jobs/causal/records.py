"""What a call of train takes and gives, as values."""

from __future__ import annotations

from typing import Any, NamedTuple

from fdora.jobs.loop import Job

FN = "jobs.train"


class TrainJob(NamedTuple):
    """An adapter of a model, and what it is trained on."""

    job: Job
    """How. Its name is the adapter's, as in ``model.add_adapter``."""
    data: Any
    """Samples: ``data[i]`` has "input_ids" and "labels", numbers, one for each token; -100 is a label that does not count. Each
    sample is read once for its length and once in each epoch."""
    batch: int = 8
    """Samples between two steps of the optimizer; the last batch of an epoch may have fewer."""
    epochs: int = 1
    steps: int | None = None
    """Of the optimizer, in as many epochs as that takes. None: ``epochs`` says how many."""
    seed: int | None = None
    """Draws an order of the samples for each epoch. None: they come as they stand."""
    evaluation: Any = None
    """Samples like those of ``data``, whose mean loss is taken at the end."""
    evaluate: int = 0
    """Steps between two evaluations before the end; 0: there are none."""


class Step(NamedTuple):
    """A step of one adapter's optimizer."""

    name: str
    step: int
    """From 1 to ``steps``."""
    steps: int
    loss: float
    """Mean over the labels of its batch, before the step."""
    rate: float
    evaluation: float | None = None
    """Mean over the labels of the evaluation's samples, after the step; None where there was no evaluation."""


class Trained(NamedTuple):
    """What came of a training, by the adapters' names. The parameters are in the model, but for what diverged."""

    losses: dict[str, tuple[float, ...]]
    """Of each batch: mean over its labels."""
    evaluations: dict[str, dict[int, float]]
    """Steps taken -> mean loss."""
    diverged: dict[str, int]
    """Those that left, and the steps that they had taken."""
