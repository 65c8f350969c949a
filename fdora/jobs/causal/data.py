"""What a call of train takes and gives, and its samples: their order, their lengths, and a microbatch of them as tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import check_positive, fail
from fdora._command import progress
from fdora.jobs.loop import Job, Work, works_of
from fdora.jobs.loop.records import check_optimizer
from fdora.jobs.loop.step import on
from fdora.jobs.schedule import Sample, Schedule, Spec, schedule, segment_ends, to_json
from fdora.jobs.schedule.records import Microbatch

FN = "jobs.train"


class TrainJob(NamedTuple):
    """An adapter of a model, and what it is trained on."""

    job: Job
    """How. Its name is the adapter's, as in ``model.add_adapter``."""
    data: Any
    """Samples: ``data[i]`` has "input_ids" and "labels", numbers, one for each token; -100 is a label that does not count. Each
    sample is read once for its length and, if it has labels that count, once in each epoch."""
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


IGNORED = -100


class Packed(NamedTuple):
    """A microbatch of M tokens, L of which are followed by one that counts."""

    ids: Tensor  # (M,)
    places: Tensor  # (M,): of each token in its sample
    at: Tensor  # (L,): tokens whose logits are wanted
    labels: Tensor  # (L,)
    counts: tuple[int, ...]  # labels of each sample
    ends: Tensor  # (G,): of each adapter's tokens
    seed: int | None = None  # of dropout's masks; None: nothing is dropped


class Read(NamedTuple):
    """A data set, and what reading it once found of the samples that are wanted."""

    arg: str
    data: Any
    tokens: dict[int, int]
    labels: dict[int, int]


class Part(NamedTuple):
    """How it goes on from a microbatch: what is left of some adapters' samples is packed."""

    adapters: Sequence[int]
    capacity: int
    start: int = 0
    depth: int = 1


class Course(NamedTuple):
    """Microbatches, and where their samples are."""

    reads: Sequence[Read]  # [adapter]
    orders: Sequence[Sequence[Sequence[int]]]  # [adapter][batch][number]: which sample
    works: tuple[Work, ...]
    schedule: Schedule  # of the last part
    mark: str  # another one for another schedule


def check_job(arg: str, each: Any) -> None:
    if not isinstance(each, TrainJob) or not isinstance(each.job, Job):
        have = f"a {type(each).__name__}"
        raise fail(FN, arg, "a TrainJob", have, 'Write TrainJob(Job("adapter", 2e-4), data).')
    check_data(f"{arg}.data", each.data)
    if each.evaluation is not None:
        check_data(f"{arg}.evaluation", each.evaluation)
    for field in ("batch", "epochs", "steps"):
        if field != "steps" or each.steps is not None:
            check_positive(FN, f"{arg}.{field}", getattr(each, field), "It counts samples, epochs or optimizer steps.")
    if type(each.evaluate) is not int or each.evaluate < 0:
        remedy = "It counts optimizer steps; 0 evaluates at the end alone."
        raise fail(FN, f"{arg}.evaluate", "an int of 0 or more", repr(each.evaluate), remedy)
    check_optimizer(FN, arg, each.job)
    if each.seed is not None:
        check_seed(f"{arg}.seed", each.seed)


def check_seed(arg: str, seed: Any) -> None:
    """As transformers' set_seed takes it. What is drawn from it adds to it, and a generator has 64 bits."""
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise fail(FN, arg, "an int from 0 to 2^32 - 1", repr(seed), "Choose a smaller one.")


def order_of(each: TrainJob) -> list[list[int]]:
    """[batch][number]: which sample."""
    count, found = len(each.data), list[list[int]]()
    of_epoch = -(-count // each.batch)
    wanted = of_epoch * each.epochs if each.steps is None else each.steps
    for epoch in range(-(-wanted // of_epoch)):
        order = list(range(count))
        if each.seed is not None:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(each.seed + epoch)).tolist()
        found += [order[i : i + each.batch] for i in range(0, count, each.batch)]
    return found[:wanted]


def read(arg: str, data: Any, wanted: Iterable[int], name: str, words: int) -> Read:
    """``words``: of the model's vocabulary. A GPU would say of a number that is none of them only that something failed."""
    tokens, labels = dict[int, int](), dict[int, int]()
    for i in progress(sorted(set(wanted)), f"lengths of {name}"):
        ids, counted = sample_of(f"{arg}[{i}]", data[i])
        counted = counted[1:][counted[1:] != IGNORED]
        tokens[i], labels[i] = len(ids), len(counted)
        numbers = torch.cat([ids, counted])
        if numbers.min() < 0 or numbers.max() >= words:
            have = f"{int(numbers.min())} to {int(numbers.max())}"
            raise fail(FN, f"{arg}[{i}]", f"of numbers from 0 to {words - 1}", have, "Take the tokenizer of this model.")
    return Read(arg, data, tokens, labels)


def course_of(reads: Sequence[Read], orders: Sequence[Sequence[Sequence[int]]], parts: Iterable[Part]) -> Course:
    """The schedule of these samples. The loss of each is a sum over its labels, so its weight is 1 / labels of its batch.
    A sample without labels adds nothing and is left out: nor could its loss show that its adapter has diverged."""
    labels = dict[tuple[int, int], int]()
    for a, batches in enumerate(orders):
        for j, batch in enumerate(batches):
            labels[a, j] = sum(reads[a].labels[i] for i in batch)
            if not labels[a, j]:
                have, remedy = f"none in samples {list(batch)[:8]}", "Leave such samples out, or shuffle."
                raise fail(FN, reads[a].arg, "such that each batch has a label", have, remedy)
    row, mark = list[Microbatch](), hashlib.sha256()
    for part in parts:
        row = row[: part.start]
        done, left = {sample for each in row for sample in each}, list[list[list[Sample]]]()
        for a in part.adapters:  # by batches, without what is done
            lengths, labelled = reads[a].tokens, reads[a].labels
            every = (
                [Sample(a, j, n, lengths[i]) for n, i in enumerate(batch) if labelled[i]] for j, batch in enumerate(orders[a])
            )
            left.append([own for batch in every if (own := [sample for sample in batch if sample not in done])])
        for a, j, n, length in chain.from_iterable(chain.from_iterable(left)):
            if length > part.capacity:
                want = f"at most {part.capacity} tokens, the capacity"
                remedy = "Truncate or split the sample, or raise the capacity."
                raise fail(FN, f"{reads[a].arg}[{orders[a][j][n]}]", want, length, remedy)
        found = schedule(
            [[[s.length for s in batch] for batch in each] for each in left], Spec(part.capacity, depth=part.depth, seconds=0)
        )
        row += [tuple(sorted(left[a][j][i] for a, j, i, _ in each)) for each in found.microbatches]
        mark.update(to_json(found).encode())
    weighed = (work._replace(weights=tuple(1 / labels[s[:2]] for s in work.samples)) for work in works_of(row))
    return Course(reads, orders, tuple(weighed), found, mark.hexdigest())


def check_data(arg: str, data: Any) -> None:
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        have = "an empty one" if hasattr(data, "__len__") else f"a {type(data).__name__}"
        raise fail(FN, arg, "a sequence of samples", have, "A list or a map-style data set; a stream has no lengths.")


def sample_of(arg: str, sample: Any) -> tuple[Tensor, Tensor]:
    """Its tokens and labels, (n,) each."""
    try:
        ids, labels = (torch.as_tensor(sample[part]) for part in ("input_ids", "labels"))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        want = 'a sample with "input_ids" and "labels", numbers'
        raise fail(FN, arg, want, f"{type(error).__name__}: {error}", "Tokenize the data set first.") from None
    if ids.dim() != 1 or ids.shape != labels.shape or not len(ids):
        have = f"{tuple(ids.shape)} and {tuple(labels.shape)}"
        raise fail(FN, arg, "of (n,) input_ids and (n,) labels, n > 0", have, "There is a label for each token.")
    if ids.is_floating_point() or labels.is_floating_point():
        raise fail(FN, arg, "of ints", f"{ids.dtype} and {labels.dtype}", "Tokenize the data set first.")
    return ids.long(), labels.long()


def pack(course: Course, work: Work, device: torch.device) -> Packed:
    """Samples one behind the other. A token's label is the one after it, in the same sample."""
    start, parts = 0, []
    for a, batch, number, _ in work.samples:
        found, i = course.reads[a], course.orders[a][batch][number]
        arg = f"{found.arg}[{i}]"
        ids, labels = sample_of(arg, found.data[i])
        at = (labels[1:] != IGNORED).nonzero()[:, 0]
        if (len(ids), len(at)) != (found.tokens[i], found.labels[i]):
            have = f"{len(ids)} tokens and {len(at)} labels, before {found.tokens[i]} and {found.labels[i]}"
            raise fail(FN, arg, "the same whenever it is read", have, "The schedule rests on it: draw samples beforehand.")
        parts.append((ids, torch.arange(len(ids)), at + start, labels[1:][at]))
        start += len(ids)
    ids, places, at, labels = (on(device, torch.cat(part)) for part in zip(*parts, strict=True))
    ends = on(device, torch.tensor(segment_ends(work.samples, len(course.orders)), dtype=torch.int32))
    return Packed(ids, places, at, labels, tuple(len(part[2]) for part in parts), ends)
