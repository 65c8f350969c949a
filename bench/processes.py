"""Processes of one group, for the benchmarks of several GPUs; on a CPU by gloo, a thread each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.clock import once, synchronize

LIMIT = timedelta(seconds=120)  # a collective that somebody does not join fails after these


def run_in_processes(world: int, device: str, fn: Callable[..., None], *arguments: Any) -> None:
    """fn(rank, *arguments) in each of ``world`` processes, which are one group while it runs. The first error is raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(member, (world, device, f"file://{folder}/store", fn, arguments), nprocs=world)


def member(rank: int, world: int, device: str, address: str, fn: Callable[..., None], arguments: tuple) -> None:
    given = {}
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
        given = {"device_id": torch.device("cuda", rank)}
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=LIMIT, **given)
    fn(rank, *arguments)
    dist.destroy_process_group()
    leave()


def timed(step: Callable[[], object], device: str) -> float:
    """Wall ms of a member's call from one barrier until every member is done."""
    dist.barrier()
    return once(lambda: (step(), synchronize(device), dist.barrier()), device)


def leave() -> None:
    """Ends this process without Python's own end, which aborts before 3.14 if a thread of gloo lets go of a tensor meanwhile.

    Such threads live as long as anything knows the group, and DTensor's caches do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
