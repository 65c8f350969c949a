"""Four jobs on one base, end to end: one after the other through PEFT and through fdora, and together.

    python -m bench.jobs --device cuda --layers 8 --json FILE
    python -m bench.jobs --device cuda --layers 8 --dropout 0.05 --json FILE:RUN
    python -m bench.jobs --device cuda --world 2 --json FILE      # two GPUs: the same as a pipeline of two stages
    python -m bench.jobs --tiny --runs 1                          # CPU; --world 2 through gloo

Layers in the shape of Llama-3.1-8B, bf16, every linear adapted. Sample lengths are bench.schedule's, by the examples that
LoRAFusion's source has for XSum, CNN/DailyMail, WikiSum and all together: ``mixed``, one kind for each job, and ``alike``, the
last for all. Every way clips each job's gradient and steps AdamW once for each of its batches. Jobs one after the other have
microbatches of their own, packed without padding by ``fdora.jobs.schedule`` as well, or as a Trainer has them: four samples as
they come, each padded to the longest (attention is causal and gets no mask for it). ``together`` is ``train_step`` on the
schedule of all, of DoRA or of plain LoRA. What the ablation takes from ``fdora_together``:

- separate: grouped kernels; a call of ``dora_linear`` for each adapter in a microbatch
- unpacked: packing; samples as they come fill a microbatch of one adapter until one does not fit
- unmerged: merging; the last microbatches of a packing stay as they are
- solved: nothing; packings are solved exactly where a greedy one may have a microbatch too many

``seconds``: median of turns of all jobs until the GPU is done; ``lora``, its share of PEFT's LoRA on packed samples, ``padded``
on padded ones. ``peak_mb``, of one turn, is beyond weights, adapters and optimizer. The breakdown runs a way's microbatches
forward, then forward and backward, then with the optimizer's steps. Before that losses and gradients of one microbatch, with
nothing dropped, are compared with PEFT's DoRA.

In a pipeline: ``alone``, one job's schedule after the other, and ``together``; and the bubble of together as measured (each
action timed by a host that waits for the GPU, busy time over the wall time of that run), as ``simulate`` has it from these
times, and as it has it from tokens alone.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from functools import partial

import optree
import torch
import torch.distributed as dist

from bench.clock import free, synchronize
from bench.decoder import apart
from bench.jobs_model import (
    CLIP,
    LINEARS,
    LR,
    TINY,
    Jobs,
    Sizes,
    by_modules,
    grouped,
    lengths_of,
    plan_of,
    separate,
    unmerged_of,
    unpacked_of,
)
from bench.multi import Bank
from bench.rivals import around_the_same_weights, fill_all, wrapped
from bench.schedule import KINDS
from bench.suite import One, Run, Some, Suite
from bench.ways import BF16, S
from fdora.functional import dora_linear_multi, dora_norm
from fdora.integrations.peft import use_fdora
from fdora.jobs.loop import Model, Wire, connect, run_pipeline, select_state, train_step, works_of
from fdora.jobs.loop.step import gradients, leaves_of, on
from fdora.jobs.schedule import Schedule, simulate
from fdora.jobs.schedule.simulate import Task


def wall(step, device) -> tuple[float, float]:
    """Seconds until it is done, and until the host had issued it: as many, where the GPU waits for the host."""
    synchronize(device)
    start = time.perf_counter()
    step()
    issued = time.perf_counter() - start
    synchronize(device)
    return time.perf_counter() - start, issued


def rows_of(turns, tokens: int) -> list[dict]:
    """A row for each way that had a turn."""
    rows = []
    for way, found in turns.items():
        if found:
            seconds, issued = zip(*found, strict=True)
            middle = statistics.median(seconds)
            row = {"way": way, "seconds": middle, "least": min(seconds), "issued": statistics.median(issued)}
            rows.append(row | {"tokens_per_s": tokens / middle})
    return rows


def message_of(tasks: Sequence[Task]) -> float:
    """From the end of an action to the start of what waited for it, on a device that had nothing else to do."""
    ends = {task.action: task.end for task in tasks}
    waits = []
    free = {}
    for device, action, start, end in sorted(tasks, key=lambda task: task.start):
        sender = ends.get(action._replace(stage=action.stage + (1 if action.backward else -1)))
        if sender is not None and sender > free.get(device, 0.0):
            waits.append(start - sender)
        free[device] = end
    return statistics.median(waits) if waits else 0.0


def bubbles(plan: Schedule, tasks: Sequence[Task], took: float, world: int) -> dict[str, float]:
    """``tasks``: of all devices, in seconds since the run began, which took ``took``."""
    spent = {(plan.microbatches[task.action.microbatch], *task.action[::2]): task.end - task.start for task in tasks}
    busy, last = sum(spent.values()), max(0.0, took - max(task.end for task in tasks))
    message = max(0.0, message_of(tasks))

    def told(transfer: float, last: float):
        return simulate(
            plan,
            world,
            forward=lambda samples, stage: spent.get((samples, stage, False), 0.0),
            backward=lambda samples, stage: spent.get((samples, stage, True), 0.0),
            transfer=transfer,
            last=last,
        )

    alone, whole = told(0.0, 0.0), told(message, last)
    return {
        "measured": 1 - busy / (world * took),
        "measured_seconds": took,
        "simulated_from_times": alone.bubble,
        "simulated_seconds": alone.time,
        "simulated_with_last": told(0.0, last).bubble,
        "simulated_with_messages": whole.bubble,
        "simulated_with_messages_seconds": whole.time,
        "message_seconds": message,
        "last_seconds": last,
        "simulated_from_tokens": simulate(plan, world).bubble,
    }


def ahead(options):
    """The kernels of fdora, in Triton's cache before a turn begins: compiled in it they took 44 s of one."""
    works = works_of(plan_of(lengths_of(options), options))
    tokens = {sum(s.length for s in work.samples) for work in works if work.samples}
    some = {n % 16 == 0: n for n in sorted(tokens)}  # Triton compiles apart what 16 divides
    shapes = {(TINY if options.tiny else Sizes()).shape(name) for name in LINEARS}
    return compile_one, [(M, *shape, options, dx) for M in some.values() for shape in shapes for dx in (True, False)]


def compile_one(M: int, K: int, N: int, options, need_x: bool) -> None:
    """A layer forward and backward. The first of a stage has no gradient to hand on."""
    i = Bank.random(M, K, N, [options.r] * len(KINDS), BF16, options.device)
    x, how = i.x if need_x else i.x.detach(), {"s": i.s, "offsets": i.offsets, "ranks": tuple(i.ranks)}
    kept = dora_norm(i.W, i.A.detach(), i.B.detach(), s=i.s)
    dora_linear_multi(x, i.W, i.A, i.B, i.m, norm=kept, **how).backward(i.dy)


def pipeline(bench: Run, jobs: Jobs) -> None:
    options, rank, links = bench.options, bench.rank, connect()
    cuts = [options.layers * n // options.world for n in range(options.world + 1)]
    stage = jobs.stage(range(cuts[rank], cuts[rank + 1]), rank == 0, rank == options.world - 1)
    begun = select_state(jobs.state(stage), stage.names)
    wire = Wire(lambda work: (sum(s.length for s in work.samples), jobs.sizes.hidden), jobs.dtype, jobs.device)

    def run(works, clock=None, state=None):
        how = {"stages": {rank: stage}, "wire": wire, "jobs": jobs.jobs, "links": links, "clock": clock}
        return run_pipeline(state or fresh(begun), works, lambda n: jobs.data(works[n]), **how)

    def clock():
        if options.device == "cuda":
            torch.cuda.current_stream().synchronize()  # not the streams of messages: they wait for the other process
        return time.perf_counter()

    def turn(way: str, n: int) -> tuple[float, float]:
        dist.barrier()
        seconds = wall(lambda: (ways[way](), synchronize(jobs.device), dist.barrier()), jobs.device)
        bench.say(f"{'warm-up' if n == 0 else f'turn {n}'}, {way}: {seconds[0]:.3f} s")
        return seconds

    def timed() -> dict | None:
        """Of one run whose actions are timed; on the first process."""
        state = fresh(begun)  # no part of the pipeline
        synchronize(jobs.device)
        dist.barrier()
        start = clock()
        tasks = run(jobs.works, clock, state).tasks
        dist.barrier()
        took, each = clock() - start, [None] * options.world
        dist.all_gather_object(each, tasks, group=links.sums)
        if rank != 0:
            return None
        done = [task._replace(start=task.start - start, end=task.end - start) for tasks in each for task in tasks]
        return {**bubbles(jobs.plan, done, took, options.world), "actions": [written(task) for task in done]}

    ways = {"alone": lambda: [run(works) for works in jobs.alone], "together": lambda: run(jobs.works)}
    turns = {way: [] for way in ways}
    found_by_turn = []
    # What the limit of time must not lose comes first: together and its bubble, then the jobs one after the other.
    for way in ("together", "alone"):
        turn(way, 0)
        for n in range(1, options.runs + 1):
            turns[way].append(turn(way, n))
            found = timed() if way == "together" else None
            if found is not None:
                bench.say(f"bubble {found['measured']:.3f}, simulated from the times {found['simulated_from_times']:.3f}")
                found_by_turn = sorted([*found_by_turn, found], key=lambda found: found["measured"])
                before = bench.result.get("bubbles", [])
                bench.set(bubble=found_by_turn[len(found_by_turn) // 2], bubbles=[*before, found["measured"]])
            bench.set(rows=rows_of(turns, jobs.tokens))
    bench.say({name: value for name, value in bench.result.get("bubble", {}).items() if name != "actions"})


def fresh(state):
    """It with gradients and moments of its own, which steps write in place."""
    return state._replace(**{part: optree.tree_map(torch.clone, getattr(state, part)) for part in ("grads", "mean", "square")})


def written(task: Task) -> str:
    """Process, microbatch, direction, and from when to when, in ms."""
    way = "backward" if task.action.backward else "forward"
    return f"{task.device} {task.action.microbatch} {way} {1e3 * task.start:.3f} {1e3 * task.end:.3f}"


MIXES = {"mixed": tuple(KINDS), "alike": ("mixed",) * len(KINDS)}
WAYS = ("peft_lora", "peft_dora", "padded_lora", "padded_dora", "fdora_alone", "fdora_together", "lora_together")
ABLATION = {"separate": None, "unpacked": unpacked_of, "unmerged": unmerged_of, "solved": partial(plan_of, seconds=10.0)}
BROKEN = ("peft_lora", "peft_dora", "fdora_together", "lora_together")  # down, into parts
MOST_APART = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


class Peft:
    """Jobs one after the other through a PEFT model with an adapter for each."""

    def __init__(self, jobs: Jobs, dora: bool, fdora: bool):
        self.jobs, self.padded = jobs, False
        base = around_the_same_weights(jobs.model)
        self.model = wrapped(base, jobs.r, S, LINEARS, dora, jobs.dropout, adapter="0")
        for a in range(1, jobs.count):
            self.model.add_adapter(str(a), self.model.peft_config["0"])
        each = [{path: params[a] for path, params in jobs.starts.items()} for a in range(jobs.count)]
        self.leaves = [fill_all(base, own, dora, str(a)) for a, own in enumerate(each)]
        if fdora:
            use_fdora(self.model, dropout_mode=jobs.dropout_mode)
        self.optimizers = [
            torch.optim.AdamW(own.values(), lr=LR, fused=jobs.device != "cpu", weight_decay=0.0) for own in self.leaves
        ]

    def on_padded(self):
        """The same model and optimizers on padded microbatches."""
        found = copy.copy(self)
        found.padded = True
        return found

    def ready(self):
        self.model.train()

    def gradients(self, work):
        a = work.samples[0].adapter
        self.model.eval().set_adapter(str(a))
        losses = by_modules(self.model, self.jobs.data(work, self.padded))
        leaves = self.leaves[a]
        return losses.detach(), dict(zip(leaves, torch.autograd.grad(losses.sum(), leaves.values()), strict=True))

    def run(self, upto="step"):
        for a, works in enumerate(self.jobs.padded if self.padded else self.jobs.alone):
            self.model.set_adapter(str(a))
            for work in works:
                if not work.samples:
                    continue
                losses = by_modules(self.model, self.jobs.data(work, self.padded))
                if upto == "forward":
                    continue
                losses.backward(on(losses.device, torch.tensor(work.weights)))
                if work.due:
                    if upto == "step":
                        torch.nn.utils.clip_grad_norm_(self.leaves[a].values(), CLIP)
                        self.optimizers[a].step()
                    self.optimizers[a].zero_grad(set_to_none=True)


class Together:
    """All jobs by ``train_step``."""

    def __init__(self, jobs: Jobs, dora: bool = True, call=grouped, schedule=None):
        self.jobs, self.schedule, self.stage = jobs, schedule, jobs.stage(range(jobs.layers), call=call)
        self.model = Model(lambda params, kept, data: self.stage.forward(params, kept, None, data), self.stage.keep)
        self.start = jobs.state(self.stage, dora)

    @property
    def works(self):
        jobs = self.jobs
        return jobs.works if self.schedule is None else works_of(self.schedule(jobs.lengths, jobs.options))

    def ready(self):
        self.state, self.todo = fresh(self.start), self.works

    def gradients(self, work):
        a = work.samples[0].adapter
        params, leaves = leaves_of(self.start.params)
        losses = self.model.forward(params, self.start.kept, self.jobs.data(work))
        torch.autograd.backward(losses.sum(), inputs=leaves)
        parts = ((f"{part} of {name}", t) for name, bank in params.items() for part, t in zip("ABm", bank, strict=True))
        return losses.detach(), {name: t.grad[a] for name, t in parts if t is not None}

    def run(self, upto="step"):
        state, model = self.state, self.model
        for work in self.todo:
            data = self.jobs.data(work, drop=True) if work.samples else None
            if upto == "step":
                state, _ = train_step(state, work, data, model=model, jobs=self.jobs.jobs, donate=True)
            elif work.samples and upto == "forward":
                model.forward(leaves_of(state.params)[0], state.kept, data)
            elif work.samples:
                gradients("bench.jobs", state, work, data, model)


def build(way: str, jobs: Jobs, ways: dict):
    """Padded samples go through the model of packed ones where it is there."""
    if way in ABLATION:
        return Together(jobs, call=separate if way == "separate" else grouped, schedule=ABLATION[way])
    if way.endswith("together"):
        return Together(jobs, way == "fdora_together")
    if way.startswith("padded"):
        packed = way.replace("padded", "peft")
        return (ways.get(packed) or build(packed, jobs, ways)).on_padded()
    return Peft(jobs, way != "peft_lora", way == "fdora_alone")


def once(way, jobs: Jobs, upto: str = "step") -> tuple[float, float, float]:
    """Wall seconds, and those of the host; peak MB beyond what was there."""
    way.ready()
    on_gpu = jobs.device != "cpu"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = wall(lambda: way.run(upto), jobs.device)
    way.state = None
    return *seconds, (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else 0.0


def timed(run: Run, jobs: Jobs, ways: dict, mix: str) -> None:
    """A row for each way, of turns."""
    options, turns, peaks = run.options, {way: [] for way in ways}, {}
    for turn in range(options.runs + 1):
        for name, way in ways.items():
            if turn and run.late([mix, turn, name]):
                continue
            found = run.failed.attempt([name], lambda _: once(way, jobs), f"{mix}, {{}}")
            for *seconds, peak in found.values():
                run.say(f"{mix}, turn {turn}, {name}: {seconds[0]:.3f} s")
                if turn:
                    turns[name].append(seconds)
                    peaks.setdefault(name, peak)
    rows = {row["way"]: row for row in rows_of(turns, jobs.tokens)}
    samples = sum(len(batch) for batches in jobs.lengths for batch in batches)
    for name, row in rows.items():
        row |= {"samples_per_s": samples / row["seconds"], "peak_mb": peaks[name]}
        for key, rival in {"lora": "peft_lora", "padded": "padded_lora"}.items():
            if rival in rows:
                row[key] = row["seconds"] / rows[rival]["seconds"]
        if peaks.get("peft_lora"):
            row["peak"] = peaks[name] / peaks["peft_lora"]
        if isinstance(ways[name], Together):
            row["microbatches"] = len(ways[name].works)
        run.add({"kind": mix} | row)


def broken_down(run: Run, jobs: Jobs, ways: dict) -> None:
    """Where the time of some ways goes, each part a median of turns that were not timed otherwise."""
    for name in [name for name in BROKEN if name in ways and not run.late(["breakdown", name])]:
        of = {}
        for upto in ("forward", "backward", "step"):
            of[upto] = statistics.median(once(ways[name], jobs, upto)[0] for _ in range(min(2, run.options.runs)))
        parts = {"forward": of["forward"], "backward": of["backward"] - of["forward"], "update": of["step"] - of["backward"]}
        run.add({"way": name} | {f"{part}_s": seconds for part, seconds in parts.items()}, part="breakdown")


def one_process(run: Run, jobs: Jobs) -> None:
    options, failures, agreement, ways = run.options, run.failed, {}, {}
    run.set(agreement=agreement, failed=failures)
    for name in options.ways:
        ways |= failures.attempt([name], lambda name: build(name, jobs, ways))
    probe = jobs.alone[0][0]
    if "peft_dora" in ways:
        losses, truth = ways["peft_dora"].gradients(probe)
        for way in [way for way in ways if way in ("fdora_alone", "fdora_together", "separate")]:
            mine, grads = ways[way].gradients(probe)
            flat = [torch.cat([each[name].flatten() for name in truth]) for each in (grads, truth)]
            agreement[way] = {"losses": apart(mine, losses)["relative"], "gradients": apart(*flat)["relative"]}
        print(agreement, flush=True)
    free(options.device)
    for mix in options.mixes:
        jobs.draw(MIXES[mix])
        timed(run, jobs, {name: way for name, way in ways.items() if mix == "mixed" or name not in ABLATION}, mix)
        if mix == "mixed":
            broken_down(run, jobs, ways)
    wrong = [way for way, found in agreement.items() if not max(found.values()) <= MOST_APART[jobs.dtype]]
    if wrong or failures:
        raise SystemExit(f"apart from PEFT's DoRA: {wrong}; failed: {dict(failures)}")


def measure(run: Run) -> None:
    options, jobs = run.options, Jobs(run.options)
    plans = {"together": len(jobs.works), "alone": sum(map(len, jobs.alone)), "padded": sum(map(len, jobs.padded))}
    plans |= {"fill": jobs.plan.fill, "capacity": jobs.capacity}
    run.set("world", "layers", "r", "dropout", "dropout_mode", tokens=jobs.tokens, microbatches=plans)
    (one_process if options.world == 1 else pipeline)(run, jobs)


OPTIONS = {
    "--layers": 4,
    "--r": 16,
    "--capacity": (6144, "tokens of a microbatch"),
    "--samples": (8, "of a batch"),
    "--batches": (3, "of each job"),
    "--ways": Some([*WAYS, *ABLATION]),
    "--mixes": Some(MIXES),
    "--dropout": (0.0, "lora_dropout of every way; nothing is dropped where results are compared"),
    "--dropout-mode": (One(("peft", "lora"), "peft"), "of fdora's DoRA"),
    "--tiny": (False, "small widths and samples in float32, for a smoke test"),
}


main = Suite(measure, OPTIONS, runs=5, seconds=600.0, world=1, ahead=ahead)
