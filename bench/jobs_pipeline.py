"""The part of bench.jobs that runs in several processes: jobs through a pipeline, and its bubble beside the simulator's."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import optree
import torch
import torch.distributed as dist

from bench.clock import synchronize
from bench.jobs import Jobs, head, lengths_of, plan_of, report, rows_of, wall
from bench.jobs_bubble import bubbles
from bench.jobs_model import LINEARS, TINY, Sizes
from bench.processes import run_in_processes
from bench.records import save
from bench.schedule import KINDS
from fdora.functional import DoraParams, dora_init, dora_linear_multi, dora_norm, dora_stack
from fdora.jobs.loop import Wire, connect, run_pipeline, select_state, works_of
from fdora.jobs.schedule.simulate import Task


def start(options) -> None:
    begin = time.perf_counter()
    if options.jobs:
        compile_all(options)
        told(f"compiled in {options.jobs} processes", begin)
    run_in_processes(options.world, options.device, worker, options, begin)


def told(what: str, begin: float) -> None:
    print(f"{time.perf_counter() - begin:6.1f} s: {what}", flush=True)


def compile_all(options) -> None:
    """The kernels of fdora, in Triton's cache before a turn begins: compiled in it they took 44 s of one."""
    works = works_of(plan_of(lengths_of(options), options))
    tokens = {sum(s.length for s in work.samples) for work in works if work.samples}
    some = {n % 16 == 0: n for n in sorted(tokens)}  # Triton compiles apart what 16 divides
    sizes = TINY if options.tiny else Sizes()
    shapes = {sizes.shape(name) for name in LINEARS}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(compile_one, M, *shape, options, dx) for M in some.values() for shape in shapes for dx in (True, False)
        ]
        for task in tasks:
            task.result()


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


def worker(rank: int, options, begin: float) -> None:
    jobs, links = Jobs(options), connect()
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
        if rank == 0:
            told(f"{'warm-up' if n == 0 else f'turn {n}'}, {way}: {seconds[0]:.3f} s", begin)
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
    result = (head(options, jobs) if rank == 0 else {}) | {"rows": [], "bubble": None, "bubbles": []}
    found_by_turn = []
    # What the limit of time must not lose comes first: together and its bubble, then the jobs one after the other.
    for way in ("together", "alone"):
        turn(way, 0)
        for n in range(1, options.runs + 1):
            turns[way].append(turn(way, n))
            found = timed() if way == "together" else None
            if found is not None:
                told(f"bubble {found['measured']:.3f}, simulated from the times {found['simulated_from_times']:.3f}", begin)
                found_by_turn.append(found)
                result["bubbles"] = [found["measured"] for found in found_by_turn]
                result["bubble"] = sorted(found_by_turn, key=lambda found: found["measured"])[len(found_by_turn) // 2]
            if rank == 0:
                save(options.json, result | {"rows": rows_of(turns, result["tokens"])})
    if rank == 0:
        print({name: value for name, value in result["bubble"].items() if name != "actions"}, flush=True)
        report(result, turns, options)


def copied(tree):
    return optree.tree_map(torch.clone, tree)


def written(task: Task) -> str:
    """Process, microbatch, direction, and from when to when, in ms."""
    way = "backward" if task.action.backward else "forward"
    return f"{task.device} {task.action.microbatch} {way} {1e3 * task.start:.3f} {1e3 * task.end:.3f}"
