"""What a training will do, in words and as a picture, before it does anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fdora._check import FdoraError
from fdora._command import writing
from fdora.jobs.causal.data import Course
from fdora.jobs.causal.fit import memory_of, seconds_of, terms_of
from fdora.jobs.causal.records import FN, TrainJob
from fdora.jobs.causal.whole import Prepared
from fdora.jobs.plan import Card
from fdora.jobs.plan.__main__ import GIB, components
from fdora.jobs.schedule import draw, simulate
from fdora.jobs.schedule.__main__ import summary


def words(model: Any, jobs: Sequence[TrainJob], ready: Prepared, card: Card | None) -> list[str]:
    """Lines for each job, the schedule, memory, and time where the rates of the GPU are known."""
    layers, banks, course, _, notes, _, why = ready
    left = course.works[notes["position"] :]
    names, lines, stages = [each.job.name for each in jobs], [], course.schedule.spec.depth
    for a, each in enumerate(jobs):
        kind, r = ("LoRA", "DoRA")[model.peft_config[names[a]].use_dora], max(layer.ranks[a] for layer in layers.values())
        lines.append(f"{of_job(each, a, course)}; {kind}, r = {r}")
    lines += [
        f"to do: {len(left)} of {len(course.works)} microbatches",
        *summary(course.schedule, notes["parts"][-1][0], stages),
        f"capacity {course.schedule.spec.capacity}: {why or 'as given'}",
    ]
    most = max(sum(sample.length for sample in work.samples) for work in course.works)
    try:
        terms = terms_of(model, layers, banks, names, course.reads)
        lines += [f"memory of the whole model and the largest microbatch, {most} tokens:", *components(memory_of(terms, most))]
    except FdoraError as error:
        return [*lines, f"memory: not planned. {error}"]
    if card is None:
        return lines
    share = stages * (1 - simulate(course.schedule, stages).bubble)  # of the GPUs, that work at a time
    time = f", about {seconds_of(terms, left, card) / share:.0f} s" if card.measured and left else ""
    return [*lines, f"{stages} x {card.name}: {card.bytes / GIB:.1f} GiB{time}"]


def of_job(each: TrainJob, a: int, course: Course) -> str:
    lengths = [[sample.length for sample in work.samples if sample.adapter == a] for work in course.works]
    seen, held = sum(map(len, lengths)), [n for n, own in enumerate(lengths) if own]
    return (
        f"{each.job.name}: {len(course.orders[a])} optimizer steps, {seen} samples, {sum(map(sum, lengths))} tokens, "
        f"{seen / len(each.data):.3g} epochs; in {len(held)} microbatches, waits in {held[-1] + 1 - len(held)} before its last"
    )


def paint(course: Course, jobs: Sequence[TrainJob], path: str) -> None:
    """The microbatches by time, each as long as it has tokens, on each stage."""
    with writing(FN, "picture"):
        names, microbatches = [each.job.name for each in jobs], [work.samples for work in course.works]
        line = simulate(microbatches, course.schedule.spec.depth)
        draw(line, path, names=names, title=f"{len(microbatches)} microbatches, bubble {line.bubble:.1%}")
