"""From a model, its adapters and their data sets to trained adapters in the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fdora._check import FdoraError, check_positive, fail
from fdora._command import progress
from fdora.functional import DoraParams
from fdora.jobs.causal.banks import Layer, Mode, layers_of, norms_of, running
from fdora.jobs.causal.data import FN, Course, Part, Step, Trained, TrainJob, check_job, check_seed, course_of, order_of, read
from fdora.jobs.causal.fit import card_of, chosen, clock_of, most, terms_of, timer_of
from fdora.jobs.causal.runs import Ran, Runs, alone, cut_of, depth_for, leave_at_end, logger, shares, staged
from fdora.jobs.loop import Job, Links, State, Work, connect, init_state, load, read_notes, save
from fdora.jobs.loop.records import FILE, TREES, Keep, check_names, kept_of
from fdora.jobs.loop.watch import watching
from fdora.jobs.plan import Card
from fdora.jobs.schedule import Schedule, Spec
from fdora.jobs.schedule.order import Batch


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
    stages: int = 1,
    dropout_mode: Mode = "peft",
    clock: Callable[[], float] | None = None,
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
        CPU, in a pipeline, or where it does not know the model), at least the longest sample, and down to three quarters of
        that where fewer places stay empty. ``fdora plan`` says which. A pipeline is simulated, and in one process on a GPU a
        few microbatches are timed first: then it is what takes least, down to a quarter. Who goes on keeps what it had.
      folder: for a checkpoint of all adapters, the schedule and the losses. A training that was stopped goes on from it, to
        the same bits on a CPU, when it is called with the same arguments and a model loaded anew. Jobs that are not in it
        begin beside the others, which go on with what they have left: as alone still, to rounding, with other masks of
        dropout. It wants all jobs that it has.
      every: microbatches between two checkpoints; there is one at the end.
      seed: draws the masks of dropout. Each adapter has its own ratio, in steps and not in evaluations, in whichever mode the
        model is.
      dropout_mode: what ``lora_dropout`` above 0 means for DoRA. "peft" is PEFT's function; a layer has one more product with
        W, and keeps its value before g. "lora" drops the input of A alone, at LoRA's price.
      on_step: is called with each :class:`Step`.
      join: is called after each microbatch with steps, and gives jobs that begin there; their adapters are in the model by
        then. It needs a folder.
      stages: of a pipeline over all processes of ``torch.distributed``, each of which calls it with the same arguments and has
        the model whole; stage n of S has layers ``L n // S`` up to ``L (n + 1) // S``. Frozen weights of other layers are not
        touched, wherever they lie. The first process writes checkpoints and reports steps; all get what is returned, and the
        trained parameters. For a checkpoint, for an evaluation (whose backward is wasted) and for ``join`` it runs empty.
      clock: by which the capacity is timed on a CPU, too; or another than the GPU's.

    Returns:
      The losses of all batches, those before a stop among them, and the evaluations. An adapter whose loss is not finite, or
      whose last step made parameters that are not, leaves, and is in the model what it was before; the others go on as if it
      had never been there.

    Raises:
      FdoraError: the model is of another kind, has dropout elsewhere than before its adapters or a loss of its router, a
        weight below an adapter that cannot be read, or learns more than its linear adapters; a job has no such adapter or no
        data; a sample is longer than the capacity, or not of the model's vocabulary; a batch has no label; the folder is of
        another training.

    Memory: beside the model and one microbatch's activations, the adapters' parameters five times (gradients, AdamW) and their
    norms; logits only of tokens with a label.
    References: Zhu et al., LoRAFusion, 2025, arXiv:2510.00206; Liu et al., DoRA, 2024, arXiv:2402.09353.
    """
    check_positive(FN, "every", every, "It counts microbatches.")
    check_positive(FN, "stages", stages, "1 is no pipeline.")
    check_seed("seed", seed)
    if join and not folder:
        raise fail(FN, "folder", "given with join", "None", "From there those that train go on, beside the new ones.")
    links = connect() if stages > 1 else Links((0,), 0, (), (), None)
    with watching(FN, links.sums):  # who fails says so to those who wait for it
        while True:
            ready = prepared(model, jobs, capacity, folder, None, depth_for(stages, links), dropout_mode, clock)
            notes, works, rows = ready.notes, ready.course.works, [each.job for each in jobs]
            if ready.why and links.rank == 0:
                logger.info("capacity %d: %s", ready.course.schedule.spec.capacity, ready.why)
            waiting, more = list[tuple[Work, Tensor]](), list[TrainJob]()
            with begun(model, rows, ready, folder, seed, stages, links) as (state, runs, write):
                write(state)  # a place that cannot be written is known before the work
                for n in progress(range(state.position, len(works)), "microbatches"):
                    if n < state.position:  # it came with the one before
                        continue
                    state, ran = runs.ahead(state, notes["diverged"], stop_of(jobs, ready.course, n, every, join))
                    notes["position"], waiting = state.position, waiting + ran
                    due = [batch for work, _ in ran for batch in work.due]
                    kept = folder is not None and (state.position % every == 0 or state.position == len(works))
                    if kept or due:  # to read losses is to wait for backward
                        note(notes["losses"], rows, waiting)
                        waiting = []
                    steps = steps_of(jobs, ready, due, partial(runs.judge, state))
                    if kept:
                        write(state)
                    for step in steps if links.rank == 0 else ():
                        logger.info("%s %d/%d: loss %.4f, rate %.2e, evaluation %s", *step)
                        if on_step:
                            on_step(step)
                    if due and join and (more := [*join()]):
                        write(state)
                        break
            if not more:
                break
            jobs = [*jobs, *more]
        names, left, state = [job.name for job in rows], notes["diverged"], runs.whole(state)
        leave_at_end(state, rows, left)
        put_back(model, ready.banks, state, names, left)
        losses = {name: tuple(each[: left.get(name)]) for name, each in notes["losses"].items()}
        return Trained(losses, {name: dict(each) for name, each in notes["evaluations"].items()}, left)


@contextmanager
def begun(
    model: Any, rows: Sequence[Job], ready: Prepared, folder: str | Path | None, seed: int, stages: int, links: Links
) -> Iterator[tuple[State, Runs, Callable[[State], None]]]:
    """Where it stands, what goes on from there, and what writes a checkpoint."""
    layers, banks, course, old = ready.layers, ready.banks, ready.course, ready.old
    cut = cut_of(model.get_base_model(), stages)
    make: Any = alone if stages == 1 else partial(staged, cut=cut, links=links)
    keep = partial(norms_of, layers) if stages == 1 else None  # a stage has norms of its own layers
    state = init_state({path: bank.params for path, bank in banks.items()}, rows, keep)
    with running(model, layers, cut.blocks) as logits:
        runs = make(model, layers, logits, state, course, rows, seed)
        if folder is not None and old:
            state = loaded(folder, state, model, rows, old, keep)

        def write(state: State) -> None:
            """By the first process; the others wait for it."""
            if folder is not None:
                state = runs.whole(state)
                if links.rank == 0:
                    save(folder, state, rows, ready.notes)
                if links.sums is not None:
                    dist.barrier(links.sums)

        yield runs.own(state), runs, write


def note(losses: dict[str, list[float]], rows: Sequence[Job], ran: Ran) -> None:
    for work, found in ran:
        for sample, share in zip(work.samples, shares(work, found), strict=True):
            losses[rows[sample.adapter].name][sample.batch] += share


def steps_of(jobs: Sequence[TrainJob], ready: Prepared, due: Iterable[Batch], judge: Callable[[Course], float]) -> list[Step]:
    """They end these batches. Evaluations are noted."""
    found, notes = [], ready.notes
    for a, j in due:
        job, course = jobs[a].job, ready.evaluations[a]
        step = Step(job.name, j + 1, len(ready.course.orders[a]), notes["losses"][job.name][j], job.rate(j))
        if course and is_due(jobs[a], step.step, step.steps):
            step = step._replace(evaluation=judge(course))
            notes["evaluations"][job.name].append([step.step, step.evaluation])
        found.append(step)
    return found


def stop_of(jobs: Sequence[TrainJob], course: Course, start: int, every: int, join: Any) -> int:
    """How far microbatches may run together: to a checkpoint, an evaluation, or where others may join."""
    for n in range(start, len(course.works)):
        due = course.works[n].due
        judged = any(is_due(jobs[a], j + 1, len(course.orders[a])) for a, j in due)
        if (n + 1) % every == 0 or judged or (join and due):
            return n + 1
    return len(course.works)


def loaded(folder: str | Path, state: State, model: Any, rows: Sequence[Job], old: Sequence[int], keep: Keep) -> State:
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
    model: Any,
    jobs: Sequence[TrainJob],
    capacity: int | None,
    folder: str | Path | None = None,
    card: Card | None = None,
    depth: int = 1,
    dropout_mode: Mode = "peft",
    clock: Callable[[], float] | None = None,
) -> Prepared:
    """``card``: another than that of the model's device. ``depth``: of the schedule, that of a pipeline."""
    names = check_arguments(jobs, capacity, dropout_mode)
    layers, banks = layers_of(model, names, dropout_mode)
    orders, why = [order_of(each) for each in jobs], ""
    words = model.get_input_embeddings().weight.shape[0]
    reads = [read(f"jobs[{a}].data", jobs[a].data, chain(*order), names[a], words) for a, order in enumerate(orders)]
    judged = [
        None if data is None else read(f"jobs[{a}].evaluation", data, range(len(data)), names[a], words)
        for a, data in enumerate(each.evaluation for each in jobs)
    ]
    notes = notes_of(folder, names)
    parts, start = notes.get("parts", []), notes.get("position", 0)

    def course() -> Course:
        return course_of(reads, orders, [Part([names.index(name) for name in own], *rest) for own, *rest in parts])

    old = [a for a, name in enumerate(names) if name in notes.get("losses", ())]
    same = len(old) == len(names)
    device = next(iter(layers.values())).W.device
    shallow = notes and device.type != "meta" and depth > Part(*parts[-1]).depth  # a plan does not know the processes
    other_end = same and notes and (capacity not in (None, parts[-1][1]) or shallow)
    if notes and (course().mark != notes["schedule"] or other_end):
        raise other(folder)
    if not same:
        if capacity is None:
            seen = [*reads, *filter(None, judged)]
            longest = max(n for each in seen for n in each.tokens.values())
            find = partial(terms_of, model, layers, banks, names, seen)
            limit = most(find, (card or card_of(device)) if depth == 1 else None)
            lengths = [[[own.tokens[i] for i in batch] for batch in order] for own, order in zip(reads, orders, strict=True)]
            clock = (clock or clock_of(device)) if depth == 1 else None  # processes would find different ones
            unplanned = Course(reads, orders, (), Schedule(Spec(longest), (), (), ()), "")
            capacity, why = chosen(lengths, longest, limit, depth, clock and timer_of(model, layers, banks, unplanned, clock))
        going = [name for name in names if name not in notes.get("diverged", ())]
        parts = [*parts, [going, capacity, start, depth]]
    whole = course()
    losses = {name: [0.0] * len(order) for name, order in zip(names, orders, strict=True)}
    begun: dict[str, dict[str, Any]] = {"losses": losses, "evaluations": {name: [] for name in names}, "diverged": {}}
    after = {key: each | notes.get(key, {}) for key, each in begun.items()}
    after |= {"schedule": whole.mark, "parts": parts, "position": start}
    every, last = range(len(jobs)), parts[-1][1]
    evaluations = [  # in one batch: losses of samples by their weights are then the mean over all labels
        each and course_of([each] * len(jobs), [[[*each.tokens]] if b == a else [] for b in every], [Part([a], last)])
        for a, each in enumerate(judged)
    ]
    return Prepared(layers, banks, whole, evaluations, after, old, why)


def check_arguments(jobs: Sequence[TrainJob], capacity: int | None, dropout_mode: str) -> list[str]:
    """The names of the jobs."""
    if dropout_mode not in ("peft", "lora"):
        raise fail(FN, "dropout_mode", "'peft' or 'lora'", repr(dropout_mode), "'lora' drops the adapter's input alone.")
    if capacity is not None:
        check_positive(FN, "capacity", capacity, "It counts tokens.")
    for a, each in enumerate(jobs):
        check_job(f"jobs[{a}]", each)
    names = [each.job.name for each in jobs]
    check_names(FN, names)
    return names


def is_due(each: TrainJob, step: int, steps: int) -> bool:
    between = each.evaluate and step % each.evaluate == 0
    return each.evaluation is not None and bool(between or step == steps)


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
