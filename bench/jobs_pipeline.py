"""The part of bench.jobs that runs in several processes: jobs through a pipeline, and its bubble beside the simulator's."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta

import optree
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.clock import synchronize
from bench.jobs import Jobs, head, report, wall
from fdora.schedule import simulate
from fdora.train import Wire, connect, run_pipeline, select_state


def start(options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (options, f"{folder}/store"), options.world)


def worker(rank: int, options, store: str) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    given = {"device_id": torch.device("cuda", rank)} if options.device == "cuda" else {}
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.world, timeout=limit, **given)
    jobs, links = Jobs(options), connect()
    cuts = [options.layers * n // options.world for n in range(options.world + 1)]
    stage = jobs.stage(range(cuts[rank], cuts[rank + 1]), rank == 0, rank == options.world - 1)
    begun = select_state(jobs.state(stage), stage.names)
    wire = Wire(lambda work: (sum(s.length for s in work.samples), jobs.sizes.hidden), jobs.dtype, jobs.device)

    def run(works, clock=None):
        fresh = begun._replace(**{part: copied(getattr(begun, part)) for part in ("grads", "mean", "square")})
        return run_pipeline(
            fresh,
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

    ways = {"alone": lambda: [run(works) for works in jobs.alone], "together": lambda: run(jobs.works)}
    turns = {way: [] for way in ways}
    for turn in range(options.runs + 1):
        for way, step in ways.items():
            dist.barrier()
            seconds = wall(lambda step=step: (step(), synchronize(jobs.device), dist.barrier()), jobs.device)
            if rank == 0:
                print(f"turn {turn}, {way}: {seconds[0]:.3f} s", flush=True)
            if turn:
                turns[way].append(seconds)
    dist.barrier()
    begin = clock()
    tasks = run(jobs.works, clock).tasks
    dist.barrier()
    took, each = clock() - begin, [None] * options.world
    dist.all_gather_object(each, tasks, group=links.sums)
    if rank == 0:
        result = head(options, jobs) | {"rows": [], "bubble": bubbles(jobs, each, took, options.world)}
        print(result["bubble"], flush=True)
        report(result, turns, options)
    dist.destroy_process_group()


def copied(tree):
    return optree.tree_map(torch.clone, tree)


def bubbles(jobs: Jobs, each, took: float, world: int) -> dict:
    spent = {}
    for tasks in each:
        for task in tasks:
            samples = jobs.plan.microbatches[task.action.microbatch]
            spent[samples, task.action.stage, task.action.backward] = task.end - task.start
    busy = sum(spent.values())
    forward = lambda samples, stage: spent.get((samples, stage, False), 0.0)  # noqa: E731
    backward = lambda samples, stage: spent.get((samples, stage, True), 0.0)  # noqa: E731
    told = simulate(jobs.plan, world, forward=forward, backward=backward)
    return {
        "measured": 1 - busy / (world * took),
        "measured_seconds": took,
        "simulated_from_times": told.bubble,
        "simulated_seconds": told.time,
        "simulated_from_tokens": simulate(jobs.plan, world).bubble,
    }
