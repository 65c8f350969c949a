"""The part of bench.jobs that runs in several processes: jobs through a pipeline, and its bubble beside the simulator's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import optree
import torch
import torch.distributed as dist

from bench.clock import synchronize
from bench.jobs_model import LINEARS, TINY, Jobs, Sizes, lengths_of, plan_of
from bench.schedule import KINDS
from bench.suite import Run
from fdora.functional import DoraParams, dora_init, dora_linear_multi, dora_norm, dora_stack
from fdora.jobs.loop import Wire, connect, run_pipeline, select_state, works_of
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
    dtype = torch.float32 if options.tiny else torch.bfloat16
    like = {"device": options.device, "dtype": dtype}
    W, s = torch.randn(N, K, **like), torch.ones(len(KINDS), device=options.device)
    x = torch.randn(M, K, **like).requires_grad_(need_x)
    params = dora_stack([dora_init(W, options.r, dtype=dtype) for _ in range(len(KINDS))])
    params = DoraParams(*(t.to(dtype).requires_grad_() for t in params))
    ends = torch.tensor([M * (a + 1) // len(KINDS) for a in range(len(KINDS))], dtype=torch.int32).to(options.device)
    kept = dora_norm(W, params.A.detach(), params.B.detach(), s=s)
    y = dora_linear_multi(x, W, *params, s=s, offsets=ends, norm=kept, ranks=(options.r,) * len(KINDS))
    y.backward(torch.zeros_like(y))


def measure(bench: Run, jobs: Jobs) -> None:
    options, rank, links = bench.options, bench.rank, connect()
    cuts = [options.layers * n // options.world for n in range(options.world + 1)]
    stage = jobs.stage(range(cuts[rank], cuts[rank + 1]), rank == 0, rank == options.world - 1)
    begun = select_state(jobs.state(stage), stage.names)
    wire = Wire(lambda work: (sum(s.length for s in work.samples), jobs.sizes.hidden), jobs.dtype, jobs.device)

    def fresh():
        return begun._replace(**{part: copied(getattr(begun, part)) for part in ("grads", "mean", "square")})

    def run(works, clock=None, state=None):
        return run_pipeline(
            state or fresh(),
            works,
            lambda n: jobs.data(works[n]),
            stages={rank: stage},
            wire=wire,
            jobs=jobs.jobs,
            links=links,
            clock=clock,
        )

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
        state = fresh()  # no part of the pipeline
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


def copied(tree):
    return optree.tree_map(torch.clone, tree)


def written(task: Task) -> str:
    """Process, microbatch, direction, and from when to when, in ms."""
    way = "backward" if task.action.backward else "forward"
    return f"{task.device} {task.action.microbatch} {way} {1e3 * task.start:.3f} {1e3 * task.end:.3f}"
