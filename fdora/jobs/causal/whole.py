"""From a model, its adapters and their data sets to trained adapters in the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fdora._check import FdoraError, check_positive, fail
from fdora._command import progress
from fdora.functional import DoraParams
from fdora.jobs.causal.banks import Layer, Logits, check_apart, layers_of, norms_of, running
from fdora.jobs.causal.data import Course, Packed, Part, Read, check_job, course_of, order_of, pack, read
from fdora.jobs.causal.fit import card_of, chosen, most, terms_of
from fdora.jobs.causal.records import FN, Step, Trained, TrainJob
from fdora.jobs.loop import Job, Model, State, Work, init_state, load, read_notes, save, train_step
from fdora.jobs.loop.files import FILE
from fdora.jobs.loop.records import TREES, Params, check_names, kept_of
from fdora.jobs.plan import Card

logger = logging.getLogger("fdora.jobs")


def train(
    model: Any,
    jobs: Sequence[TrainJob],
    *,
    capacity: int | None = None,
    folder: str | Path | None = None,
    every: int = 100,
    seed: int = 0,
    on_step: Callable[[Step], Any] | None = None,
    join: Callable[[], Iterable[TrainJob]] | None = None,
) -> Trained:
    """Train adapters of one model together: for each, ``P_a <- AdamW_a(P_a, clip_a(d loss_a / dP_a))``, as if it were alone.

    A batch's loss is the mean cross-entropy over its labels, as in transformers' ``Trainer``. Samples of all adapters are
    packed into microbatches without padding; position_ids start anew in each, by which transformers keeps them apart (that they
    are is tried first). Each step is a line of the logger "fdora.jobs". The trained parameters end in the model, so that
    ``model.save_pretrained`` writes them; until then it is unchanged. Its mode stays: call ``model.train()`` for activation
    checkpointing.

        model = get_peft_model(base, LoraConfig(use_dora=True), adapter_name="law")
        model.add_adapter("med", LoraConfig(r=16))
        jobs = [TrainJob(Job("law", 2e-4), law, epochs=2), TrainJob(Job("med", 1e-4, clip=1.0), med)]
        train(model, jobs, folder="run")

    Args:
      model: a PeftModel around a causal model of transformers: Llama, Qwen3, Gemma 3, Mistral, Qwen3-MoE, Mixtral, or another
        whose packed samples do not see each other. Adapters are DoRA or LoRA, of any rank and alpha, on any of its nn.Linear
        layers that get all tokens, or on quantised ones whose product is that of the decoded weight.
      jobs: an adapter, its data and its optimizer each.
      capacity: the most tokens of a microbatch. None: at most what the planner says fits into the GPU's memory (4096 on a
        CPU, or where it does not know the model), at least the longest sample, and down to three quarters of that where fewer
        places stay empty. ``fdora plan`` says which.
      folder: for a checkpoint of all adapters, the schedule and the losses. A training that was stopped goes on from it, to
        the same bits on a CPU, when it is called with the same arguments and a model loaded anew. Jobs that are not in it
        begin beside the others, which go on with what they have left: as alone still, to rounding, with other masks of
        dropout. It wants all jobs that it has.
      every: microbatches between two checkpoints; there is one at the end.
      seed: draws the masks of dropout. Each adapter has PEFT's meaning and its own ratio, in steps and not in evaluations, in
        whichever mode the model is. A layer with dropout has one more product with W, and keeps a mask and D(x) for backward.
      on_step: is called with each :class:`Step`.
      join: is called after each microbatch with steps, and gives jobs that begin there; their adapters are in the model by
        then. It needs a folder.

    Returns:
      The losses of all batches, those before a stop among them, and the evaluations. An adapter whose loss is not finite
      leaves, and is in the model what it was before; the others go on as if it had never been there.

    Raises:
      FdoraError: the model is of another kind, has dropout elsewhere than before its adapters or a loss of its router, a
        weight below an adapter that cannot be read, or learns more than its linear adapters; a job has no such adapter or no
        data; a sample is longer than the capacity; a batch has no label; the folder is of another training.

    Memory: beside the model and one microbatch's activations, the adapters' parameters five times (gradients, AdamW) and their
    norms; logits only of tokens with a label.
    References: Zhu et al., LoRAFusion, 2025, arXiv:2510.00206; Liu et al., DoRA, 2024, arXiv:2402.09353.
    """
    check_positive(FN, "every", every, "It counts microbatches.")
    if join and not folder:
        raise fail(FN, "folder", "given with join", "None", "From there those that train go on, beside the new ones.")
    while True:
        layers, banks, course, evaluations, notes, old, _ = prepared(model, jobs, capacity, folder)
        rows = [each.job for each in jobs]
        names, more = [job.name for job in rows], list[TrainJob]()
        keep = partial(norms_of, layers)
        state = init_state({path: bank.params for path, bank in banks.items()}, rows, keep)
        with running(model, layers) as logits:
            check_apart(model, logits, state.params, state.kept)
        if folder is not None:
            state = loaded(folder, state, model, rows, old, keep) if old else state
            save(folder, state, rows, notes)  # a place that cannot be written is known before the work
        with running(model, layers) as logits:
            plain, whole = Model(partial(losses_of, logits), keep), Model(partial(finite_losses_of, logits), keep)
            waiting = list[tuple[Work, Tensor]]()
            for n in progress(range(state.position, len(course.works)), "microbatches"):
                state, found, work = advanced((plain, whole), state, course, notes, rows, seed * len(course.works) + n)
                notes["position"] = state.position
                waiting.append((work, found))
                kept = folder if (n + 1) % every == 0 or n + 1 == len(course.works) else None
                while (kept is not None or work.due) and waiting:  # to read losses is to wait for backward
                    ran, lost = waiting.pop(0)
                    for sample, share in zip(ran.samples, shares(ran, lost), strict=True):
                        notes["losses"][names[sample.adapter]][sample.batch] += share
                steps = []
                for a, j in work.due:
                    step = Step(names[a], j + 1, len(course.orders[a]), notes["losses"][names[a]][j], rows[a].rate(j))
                    if is_due(jobs[a], step):
                        step = step._replace(evaluation=evaluated(plain, state, evaluations[a]))
                        notes["evaluations"][names[a]].append([step.step, step.evaluation])
                    steps.append(step)
                if kept is not None:
                    save(kept, state, rows, notes)
                for step in steps:
                    logger.info("%s %d/%d: loss %.4f, rate %.2e, evaluation %s", *step)
                    if on_step:
                        on_step(step)
                if work.due and join and folder and (more := [*join()]):
                    save(folder, state, rows, notes)
                    break
        if not more:
            break
        jobs = [*jobs, *more]
    left = notes["diverged"]
    put_back(model, banks, state, names, left)
    losses = {name: tuple(each[: left.get(name)]) for name, each in notes["losses"].items()}
    return Trained(losses, {name: dict(each) for name, each in notes["evaluations"].items()}, left)


def loaded(
    folder: str | Path, state: State, model: Any, rows: Sequence[Job], old: Sequence[int], keep: Callable[[Params], Any]
) -> State:
    """The state in the folder. Adapters that are not among the old ones begin, perhaps on more layers or with a higher rank."""
    if len(old) == len(rows):
        return load(folder, state, rows, keep)
    own = [rows[a] for a in old]
    _, banks = layers_of(model, [job.name for job in own])
    before = load(folder, init_state({path: bank.params for path, bank in banks.items()}, own), own)
    for part in TREES:
        for path, params in getattr(before, part).items():
            for t, was in zip(getattr(state, part)[path], params, strict=True):
                if was is not None:
                    where: Any = ([*old], *map(slice, was.shape[1:]))
                    t[where] = was
    steps = tuple(before.steps[old.index(a)] if a in old else 0 for a in range(len(rows)))
    return state._replace(kept=kept_of(keep, state.params), steps=steps, position=before.position)


def advanced(
    models: tuple[Model, Model], state: State, course: Course, notes: dict[str, Any], rows: Sequence[Job], draw: int
) -> tuple[State, Tensor, Work]:
    """The next microbatch, without adapters that have diverged; those that do so in it leave, and it is done again."""
    names, device = [job.name for job in rows], device_of(state)
    while True:
        work = without(course.works[state.position], [names.index(name) for name in notes["diverged"]])
        packed = pack(course, work, device)._replace(seed=draw) if work.samples else None
        try:
            return *train_step(state, work, packed, model=models[1], jobs=rows, donate=True), work
        except ArithmeticError:
            for a in diverging(models[0], state, course, work, draw):
                notes["diverged"][names[a]] = state.steps[a]
                logger.warning("%s diverged after %d steps and leaves: it stays as it was", names[a], state.steps[a])


def device_of(state: State) -> torch.device:
    """That of all layers."""
    return next(iter(state.params.values())).A.device


class Prepared(NamedTuple):
    """A training before it begins."""

    layers: dict[str, Layer]
    banks: dict[str, Any]
    course: Course
    evaluations: Sequence[Course | None]  # of each adapter
    notes: dict[str, Any]
    """With what has been done; all but tensors of a checkpoint."""
    old: Sequence[int]
    """Adapters that go on."""
    why: str
    """Of the capacity, where it was chosen."""


def prepared(
    model: Any, jobs: Sequence[TrainJob], capacity: int | None, folder: str | Path | None = None, card: Card | None = None
) -> Prepared:
    """``card``: another than that of the model's device."""
    for a, each in enumerate(jobs):
        check_job(f"jobs[{a}]", each)
    names = [each.job.name for each in jobs]
    check_names(FN, names)
    layers, banks = layers_of(model, names)
    orders, why = [order_of(each) for each in jobs], ""
    reads = [read(f"jobs[{a}].data", jobs[a].data, chain(*order), names[a]) for a, order in enumerate(orders)]
    judged = [
        None if data is None else read(f"jobs[{a}].evaluation", data, range(len(data)), names[a])
        for a, data in enumerate(each.evaluation for each in jobs)
    ]
    notes = notes_of(folder, names)
    parts, start = notes.get("parts", []), notes.get("position", 0)

    def course() -> Course:
        return course_of(reads, orders, [Part([names.index(name) for name in own], *rest) for own, *rest in parts])

    old = [a for a, name in enumerate(names) if name in notes.get("losses", ())]
    same = len(old) == len(names)
    if notes and (course().mark != notes["schedule"] or (same and capacity not in (None, parts[-1][1]))):
        raise other(folder)
    if not same:
        if capacity is None:
            every, device = [*reads, *filter(None, judged)], next(iter(layers.values())).W.device
            longest = max(n for each in every for n in each.tokens.values())
            limit = most(partial(terms_of, model, layers, banks, names, every), card or card_of(device))
            lengths = [[[own.tokens[i] for i in batch] for batch in order] for own, order in zip(reads, orders, strict=True)]
            capacity, why = chosen(lengths, longest, limit)
        going = [name for name in names if name not in notes.get("diverged", ())]
        parts = [*parts, [going, capacity, start]]
    whole = course()
    begun: dict[str, dict[str, Any]] = {
        "losses": {name: [0.0] * len(order) for name, order in zip(names, orders, strict=True)},
        "evaluations": {name: [] for name in names},
        "diverged": {},
    }
    after = {key: each | notes.get(key, {}) for key, each in begun.items()}
    after |= {"schedule": whole.mark, "parts": parts, "position": start}
    evaluations = [found and evaluation_of(found, a, len(jobs), parts[-1][1]) for a, found in enumerate(judged)]
    return Prepared(layers, banks, whole, evaluations, after, old, why)


def evaluation_of(found: Read, a: int, adapters: int, capacity: int) -> Course:
    """Its samples as one batch: losses of samples by their weights are then the mean over all labels."""
    orders: list[list[list[int]]] = [[[*found.tokens]] if b == a else [] for b in range(adapters)]
    return course_of([found] * adapters, orders, [Part([a], capacity)])


def is_due(each: TrainJob, step: Step) -> bool:
    between = each.evaluate and step.step % each.evaluate == 0
    return each.evaluation is not None and bool(between or step.step == step.steps)


def losses_of(logits: Logits, params: Any, norms: Any, packed: Packed) -> Tensor:
    """Of each sample the sum over its labels."""
    found = logits(params, norms, packed)
    wide = found.to(torch.promote_types(found.dtype, torch.float32))
    each = cross_entropy(wide, packed.labels, reduction="none")
    return torch.stack([own.sum() for own in each.split(packed.counts)])


def finite_losses_of(logits: Logits, params: Any, norms: Any, packed: Packed) -> Tensor:
    """It waits for the GPU. The samples of a microbatch share products, of which a mask makes 0 times NaN: where one adapter's
    are not finite, those of all may be NaN, and nothing may be added to anybody's gradient."""
    losses = losses_of(logits, params, norms, packed)
    if not bool(losses.isfinite().all()):
        raise ArithmeticError
    return losses


@torch.no_grad()
def diverging(model: Model, state: State, course: Course, work: Work, draw: int) -> list[int]:
    """Adapters whose losses are not finite without those of the others; all, where that is so of none alone."""
    found, here = [], list(dict.fromkeys(sample.adapter for sample in work.samples))
    for a in here:
        own = without(work, [sample.adapter for sample in work.samples if sample.adapter != a])
        packed = pack(course, own, device_of(state))._replace(seed=draw)
        if not bool(model.forward(state.params, state.kept, packed).isfinite().all()):
            found.append(a)
    return found or here


def without(work: Work, adapters: Sequence[int]) -> Work:
    kept = [each for each in zip(work.samples, work.weights, strict=True) if each[0].adapter not in adapters]
    samples, weights = zip(*kept, strict=True) if kept else ((), ())
    return Work(samples, weights, tuple(batch for batch in work.due if batch[0] not in adapters))


def shares(work: Work, losses: Tensor) -> list[float]:
    """What each sample adds to the loss of its batch."""
    return (losses.double().cpu() * torch.tensor(work.weights, dtype=torch.float64)).tolist()


@torch.no_grad()
def evaluated(model: Model, state: State, course: Course | None) -> float:
    assert course is not None
    device = device_of(state)
    return sum(sum(shares(work, model.forward(state.params, state.kept, pack(course, work, device)))) for work in course.works)


def notes_of(folder: str | Path | None, names: Sequence[str]) -> dict[str, Any]:
    """Those of a checkpoint, all of whose jobs are there; none where there is none."""
    if folder is None or not (Path(folder) / FILE).exists():
        return {}
    notes: Any = read_notes(folder)
    if not isinstance(notes, dict) or "parts" not in notes or not notes["losses"].keys() <= {*names}:
        raise other(folder)
    return notes


def other(folder: str | Path | None) -> FdoraError:
    remedy = (
        "Pass all of its jobs with the data, batches, epochs, seeds and capacity that it was written with, or a new folder."
    )
    return fail(FN, "folder", "of this training, or new", f"another schedule in {folder}", remedy)


def put_back(model: Any, banks: dict[str, Any], state: State, names: Sequence[str], left: Collection[str]) -> None:
    """The rows of the adapters that each layer has, but for those that left."""
    from fdora.integrations.peft import write_banks

    found = {}
    for path, bank in banks.items():
        own = [i for i, name in enumerate(bank.adapters) if name not in left]
        rows = [names.index(bank.adapters[i]) for i in own]
        params: list[Any] = [None if t is None else t[rows] for t in state.params[path]]
        adapters, ranks = (tuple(each[i] for i in own) for each in (bank.adapters, bank.ranks))
        if own:
            found[path] = bank._replace(adapters=adapters, ranks=ranks, params=DoraParams(*params))
    write_banks(model, found)
