"""A pipeline as the simulator has it: bench.jobs' on two GPUs, beside what was measured of it, and a 70B's in more stages.

    python -m bench.jobs_bubble --run h200/jobs_pipeline --stages 4,8

Of the run three times go in, one after the other: what each action took (with the optimizer steps before it), a message (median
time from the end of an action to the start on the other device of what waits for it alone), and what follows the last action,
which are the last optimizer steps. What is left is the host: it issues the next action once the one before it is seen to be
done. ``predicted`` has the last two, and what its actions take is found as for the 70B.

An action of a stage takes as long as its layers: their seven linears as ``h100/layer_all`` measured them, DoRA of rank 16 with
its norm given, on a line between the tokens there (below the least of them down to a read of W); attention, norms, sums and the
last stage's head by the measured rates of fdora.jobs.plan on an H200; an optimizer's step for each layer, and a message for
each number in it, as in that run. Samples, adapters and what is reported are bench.schedule's, whose ways have four more:

- padded: a batch of one adapter after the other, four samples a microbatch, padded to the longest;
- mLoRA: the same microbatches in one pipeline, adapters by turns, each waiting for its own step alone;
- chosen: a schedule with the tokens in a microbatch that fdora.jobs.train chooses for a pipeline, at most --capacity;
- apart: the schedule with the gradients of A, B and m in the bubbles behind their backward. They then read dy once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from numpy import interp

from bench import jobs, records, schedule
from bench.decoder import SIZES
from bench.jobs import bubbles
from bench.jobs_model import PADDED, lengths_of, plan_of
from bench.quant_model import MODELS
from bench.suite import Run, Suite
from bench.table import pivot, side_by_side
from fdora.jobs.causal.fit import Choice, chosen
from fdora.jobs.plan import Adapter, Model, Part, Setup, card, read_model
from fdora.jobs.plan.decoder import decoder
from fdora.jobs.plan.layout import stages_of
from fdora.jobs.plan.tape import E
from fdora.jobs.schedule import Sample, Schedule, Spec, Timeline, insert_noops, simulate
from fdora.jobs.schedule.order import places
from fdora.jobs.schedule.records import Microbatch
from fdora.jobs.schedule.simulate import Action, Task

LAYERS, R = "h100/layer_all", 16
RATES = card("h200").profile


def tasks_of(actions: Sequence[str]) -> list[Task]:
    """Of a result file's ``actions``: process, microbatch, direction, and from when to when, in ms."""
    each = (action.split() for action in actions)
    return [Task(int(d), Action(int(d), int(n), way == "backward"), float(s) / 1e3, float(e) / 1e3) for d, n, way, s, e in each]


@cache
def measured(K: int, N: int, mode: str) -> tuple[list[float], list[float]]:
    """Tokens, and seconds of so many; of none, those of reading W."""
    run, case = records.result(LAYERS), {"K": K, "N": N, "r": R, "mode": mode, "norm": "given", "adapter": "bf16"}
    rows = [row for row in run["rows"] if row.items() >= case.items()]
    reads = (1 + (mode == "fwd_bwd")) * E * K * N / run["about"]["bytes_per_ms"]
    return [0, *(row["M"] for row in rows)], [ms / 1e3 for ms in (reads, *(row["ms"]["fdora"] for row in rows))]


@cache
def layer(model: Model, lengths: tuple[int, ...], last: bool = False) -> tuple[float, float]:
    """Seconds of a layer forward and backward; ``last``: with the head behind it."""
    tokens, shapes = sum(lengths), [(K, N) for N, K in model.linears.values()]
    forward, both = (sum(float(interp(tokens, *measured(*each, mode))) for each in shapes) for mode in ("fwd", "fwd_bwd"))
    setup = Setup(sum(n * n for n in lengths) / tokens, (Adapter("", R),))  # each token attends to half of its sample
    ops = [op for each in decoder(model, setup, tokens, Part(1, False, last)).segments for op in each.ops if not op.work.calls]
    more = (sum(RATES.seconds(getattr(op.work, way)) for op in ops) for way in ("forward", "backward"))
    return forward + next(more), both - forward + next(more)


class Line(NamedTuple):
    """A pipeline with so many layers of the model in each stage."""

    model: Model
    stages: Sequence[int]
    step: float  # seconds of an optimizer step, for each layer
    waits: dict[str, float]

    def seconds(self, back: bool, samples: Microbatch, stage: int) -> float:
        if not samples:
            return 0.0
        lengths = tuple(sorted(sample.length for sample in samples))
        one, last = layer(self.model, lengths)[back], self.model.vocab > 1 and stage == len(self.stages) - 1
        return (self.stages[stage] - 1) * one + layer(self.model, lengths, last)[back]

    def gradients(self, samples: Microbatch, stage: int) -> tuple[float, float]:
        """Of dA, dB and dm: what backward saves without them, reads of x and y, and what they take then: dy once more."""
        bytes = E * sum(sample.length for sample in samples) * self.stages[stage]
        N, K = (bytes / RATES.bytes * sum(each) for each in zip(*self.model.linears.values(), strict=True))
        return K + N, K + 2 * N

    def run(self, plan: Schedule | Sequence[Microbatch], less: Any = MappingProxyType({})) -> Timeline:
        """``less``: by what (samples, stage, backward) takes less than it would."""
        microbatches = tuple(plan.microbatches if isinstance(plan, Schedule) else plan)
        stepping = steps_of(microbatches)

        def seconds(back: bool, samples: Microbatch, stage: int) -> float:
            steps = self.step * self.stages[stage] if samples in stepping and not back else 0.0
            return self.seconds(back, samples, stage) + steps - less.get((samples, stage, back), 0.0)

        ways = {"forward": partial(seconds, False), "backward": partial(seconds, True)}
        return simulate(microbatches, len(self.stages), **ways, **self.waits)

    def apart(self, plan: Schedule) -> Timeline:
        """Gradients of weights in gaps behind their backward; those that find none before an optimizer steps come then."""
        every, stepping, last = range(len(self.stages)), steps_of(plan.microbatches), 0.0
        less = {(each, d, True): self.gradients(each, d)[0] for each in plan.microbatches for d in every}
        timeline = self.run(plan, less)
        for device in every:
            now = left = 0.0
            for _, action, start, end in sorted((t for t in timeline.tasks if t.device == device), key=lambda t: t.start):
                samples, left, now = plan.microbatches[action.microbatch], max(0.0, left - (start - now)), end
                if action.backward:
                    left += self.gradients(samples, device)[1]
                elif samples in stepping:
                    less[samples, device, False], left = -left, 0.0
            last = max(last, now + left - timeline.time)
        return self.run(plan, less)._replace(last=last)


def steps_of(microbatches: Sequence[Microbatch]) -> set[Microbatch]:
    """Before whose forward an optimizer steps: the first with samples of a batch that is not its adapter's first."""
    return {microbatches[at[0]] for (_, batch), at in places(microbatches).items() if batch}


def of_run(name: str) -> tuple[dict[str, float], Line]:
    """What was measured, simulated from the times of its actions, and predicted; with the pipeline that this takes it for."""
    result = records.result(name)
    options = jobs.main.parse(result["about"]["arguments"].split())
    plan, bubble = plan_of(lengths_of(options), options), result["bubble"]
    tasks, stepping = tasks_of(bubble["actions"]), steps_of(plan.microbatches)
    found = bubbles(plan, tasks, bubble["measured_seconds"], result["world"])
    stages = (options.layers // options.world,) * options.world
    forward = [(plan.microbatches[t.action.microbatch] in stepping, t.end - t.start) for t in tasks if not t.action.backward]
    with_step, without = (mean(took for steps, took in forward if steps == wanted) for wanted in (True, False))
    waits = {"transfer": found["message_seconds"], "last": found["last_seconds"]}
    model = read_model(SIZES["causal"]["llama-3.1-8b"][1] | {"model_type": "llama", "vocab_size": 1})
    line = Line(model, stages, (with_step - without) / stages[0], waits)
    said = line.run(plan)
    return found | {"predicted": said.bubble, "predicted_seconds": said.time, "step_seconds": line.step}, line


def row_of(line: Line, lengths: list, spec: Spec) -> Iterator[tuple[str, dict]]:
    """As `bench.schedule.row` has them."""
    rounds, rows = [padded(samples) for samples in schedule.alone(lengths)], {}
    tokens = sum(chain(*chain(*lengths)))
    for way, each in {"padded": rounds, "mLoRA": [insert_noops([*chain(*rounds)], spec)]}.items():
        microbatches = [*chain(*each)]
        rows[way] = schedule.of([line.run(one) for one in each], len(microbatches), microbatches.count(()), spec, 0)
        rows[way]["throughput"] *= tokens / sum(sample.length for sample in chain(*microbatches))
    rows |= schedule.row(lengths, spec, line.run)
    own = spec._replace(capacity=chosen(lengths, max(chain(*chain(*lengths))), Choice(spec.capacity, ""), spec.depth).tokens)
    found = schedule.schedule(lengths, own)
    rows["chosen"] = schedule.of([line.run(found)], len(found.microbatches), found.noops, own, found.bound)
    apart, whole = line.apart(schedule.schedule(lengths, spec)), rows["schedule"]
    rows["apart"] = whole | {"throughput": apart.throughput}
    rows["apart"]["bubble"] = 1 - (1 - whole["bubble"]) * apart.throughput / whole["throughput"]
    yield from rows.items()


def padded(samples: Sequence[Sample]) -> list[Microbatch]:
    parts = [samples[i : i + PADDED] for i in range(0, len(samples), PADDED)]
    return [tuple(each._replace(length=max(one.length for one in part)) for each in part) for part in parts]


def rows(options, like: Line) -> Iterator[dict]:
    layers, vocab = MODELS["70b"]
    sizes = {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": vocab}
    model, full = read_model(SIZES["layers"]["70b"] | sizes), (options.capacity // 8,) * 8
    one, with_head = (sum(layer(model, full, last)) for last in (False, True))
    waits = {"transfer": like.waits["transfer"] * model.hidden / like.model.hidden}
    for count in options.stages:
        line = Line(model, stages_of(layers, count, with_head / one - 1), like.step, waits)
        for row in schedule.rows(
            Spec(options.capacity, count, 1, 0.0), options.batches, options.samples, partial(row_of, line)
        ):
            yield {"world": count} | row


def markdown(result: dict) -> str:
    """Bubbles and tokens per second."""
    cells = pivot(result["rows"], lambda row: (row["world"], row["adapters"]), "{bubble:.1%}, {throughput:.0f}".format_map)
    return side_by_side(["stages", "adapters"], cells)


def measure(run: Run) -> None:
    check, line = of_run(run.options.run)
    run.add({"run": run.options.run} | check, part="checks")
    run.add(*rows(run.options, line))


OPTIONS = {
    "--run": ("h200/jobs_pipeline", "of bench.jobs --world; the default is %(default)s"),
    "--stages": [4, 8],
    "--capacity": 6144,
    "--samples": 16,
    "--batches": 12,
}


main = Suite(measure, OPTIONS, show=markdown)
